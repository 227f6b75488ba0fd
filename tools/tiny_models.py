"""Tiny seeded models of every causal-LM `model_type` of transformers: small fields by name, oddities as rows.

The fields are chosen to be awkward: an odd vocabulary, fewer key/value heads than heads, heads whose size is not
`hidden_size / num_attention_heads`, windows shorter than the prompts, and two periods more than an export traces.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmconv.export.fake_model import period, stored_buffers
from tools.state_configs import STATE_CONFIGS

FIELDS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "embedding_size": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "d_ff": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "top_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rotary_dim": 8,
    "max_position_embeddings": 256,
    "max_seq_len": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "sliding_window": 9,
    "attention_window_size": 9,
    "is_decoder": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Applied to every config that has the field."""

ODDITIES: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 16},
    "gemma4_text": {"vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 16, "global_head_dim": 32},
}
"""Fields of one `model_type`, over those above."""

DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")


def tiny_config(model_type: str, num_layers: int) -> Any:
    """The config of a tiny model with `num_layers` layers, or as many as `STATE_CONFIGS` says.

    Raises:
        Exception: whatever transformers raises of a config.
    """
    if model_type in STATE_CONFIGS:
        return AutoConfig.for_model(model_type, **STATE_CONFIGS[model_type])
    default = AutoConfig.for_model(model_type)
    known = set(inspect.signature(type(default).__init__).parameters) | set(default.to_dict())
    alias = type(default).attribute_map
    fields = {name: value for name, value in FIELDS.items() if name in known and name not in alias}
    fields |= {name: num_layers for name in DEPTH if name in known and name not in alias}
    if "kv_lora_rank" in fields:  # latent attention: its keys have a head each, and `head_dim` is what rotates
        latent = {"num_key_value_heads": 4, "head_dim": FIELDS["qk_rope_head_dim"]}
        fields |= {name: value for name, value in latent.items() if name in fields}
    fields |= ODDITIES.get(model_type, {})
    config = AutoConfig.for_model(model_type, **fields)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if 1 < len(kinds) < period(config) and "layer_types" in known and "layer_types" not in fields:
        pattern = [kinds[layer % len(kinds)] for layer in range(num_layers)]  # each kind once: a short period
        config = AutoConfig.for_model(model_type, **fields, layer_types=pattern)
    return config


def save_tiny(model_type: str, folder: Path, num_layers: int) -> Any:
    """Saves a seeded float32 model, every weight random; returns its config."""
    config = tiny_config(model_type, num_layers)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        stored = [module._buffers[name] for module, name in stored_buffers(model)]
        for tensor in [*model.parameters(), *stored]:
            tensor.add_(torch.randn_like(tensor) * 0.05)
    model.save_pretrained(folder)
    return config


def depth(model_type: str) -> int:
    """Layers of the tiny model: five periods, of which an export traces three."""
    repeat = period(tiny_config(model_type, 24))
    return 5 * repeat if repeat < 24 else 6
