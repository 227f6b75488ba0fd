"""Tiny models of every family as transformers saves them, all weights random, and what tells whether two are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.convert.models.model_config import settings_of

ROTARY: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "mistral": {**ROTARY, "sliding_window": None},
    "qwen2": ROTARY,
    "qwen3": {**ROTARY, "head_dim": 16},
    "glm": {**ROTARY, "head_dim": 8},
    "gpt2": {"vocab_size": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "bloom": {"vocab_size": 24, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}


def save_tiny(folder: Path, kind: str, dtype: str = "float32", **changes: Any) -> Path:
    """A Hugging Face folder of the `model_type` `kind`, with seeded weights."""
    config = AutoConfig.for_model(kind, **(FIELDS[kind] | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return folder


def contents(tensors: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every bit of every tensor."""
    return {name: (tensor.dtype.name, tensor.shape, tensor.read().tobytes()) for name, tensor in tensors.items()}


def identity(folder: Path) -> tuple[Any, ...]:
    """Equal for two folders of the same model: settings, special tokens, element type and every bit."""
    checkpoint: Checkpoint = open_checkpoint(folder)
    tokens = [checkpoint.config.get(f"{name}_token_id") for name in ("bos", "eos")]
    return settings_of(checkpoint), tokens, contents(checkpoint)
