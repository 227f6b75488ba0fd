"""Tiny seeded models of every supported family, made once per test session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DECODER = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A Llama-like decoder with grouped-query attention."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "mistral": {**DECODER, "sliding_window": None},
    "qwen2": {**DECODER, "tie_word_embeddings": True},
    "qwen3": {**DECODER, "head_dim": 16},
    "gemma2": {**DECODER, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "bloom": {
        "vocab_size": 96,
        "hidden_size": 64,
        "n_layer": 4,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
}


def save_tiny(model_type: str, folder: Path) -> Path:
    """Saves a seeded float32 model of four layers as a Hugging Face folder, every weight and bias random."""
    import torch  # noqa: PLC0415 - only the tests that ask for a model pay for it
    import transformers  # noqa: PLC0415

    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny(model_type)` is the folder of a tiny model; do not write into it."""
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = save_tiny(model_type, tmp_path_factory.mktemp("tiny") / model_type)
        return folders[model_type]

    return folder
