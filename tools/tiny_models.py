"""Tiny seeded models of every causal-LM `model_type` of transformers: small sizes by field name, exceptions as rows.

The fields are chosen to be awkward: an odd vocabulary, fewer key/value heads than heads, heads whose size is not
`hidden_size / num_attention_heads`, windows shorter than the prompts, and two periods more than an export traces.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from llmconv.export.families import INPUT_MAPS
from llmconv.export.input_map import decoder_config
from llmconv.export.tracing.fake_model import period, stored_buffers
from llmconv.runtime.eager.stored_tensors import kept_in_float32
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

QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
STACKED = {"out_hidden_size": 64, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1, 3], "depth": 4}
TOKENS = {"image_token_id": 130, "video_token_id": 129, "vision_start_token_id": 128, "vision_end_token_id": 127}
"""What the configs of Qwen2-VL and later have in common."""

ODDITIES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "cohere_compass_text": {
        "num_hidden_layers": 10,
        "layer_types": ["sliding_attention", "full_attention"] * 5,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            for name in ("sliding_attention", "full_attention")
        },
        "logit_scale": 0.5,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_k": 2},
    "gpt_neo": {"num_layers": 10, "attention_types": [[["global", "local"], 5]], "window_size": 9},
    "gemma3": {
        "image_token_id": 130,
        "mm_tokens_per_image": 4,
        "vision_config": {"image_size": 16, "patch_size": 4},
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "granitemoe_swa": {"attention_multiplier": 0.2},  # its default leaves scores unscaled: rounding then grows unevenly
    "helium": {"head_dim": 16},
    "llama4": {
        "image_token_index": 130,
        "vision_config": {
            "intermediate_size": 128,  # of four patches
            "image_size": 28,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
            "vision_output_dim": 24,
        },
    },
    **{f"{name}_text": {"head_dim": 16, **MROPE} if "3" in name else MROPE for name in QWEN_VL},
    "qwen2_vl": {
        "vision_config": {**PATCHES, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "depth": 5},
        **TOKENS,
    },
    "qwen2_5_vl": {
        "vision_config": {
            **PATCHES,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "depth": 4,
        },
        **TOKENS,
    },
    "qwen3_vl": {"vision_config": {**PATCHES, **STACKED}, **TOKENS},
    "qwen3_vl_moe": {"vision_config": {**PATCHES, **STACKED}, **TOKENS},
    "zaya": {"num_experts_per_tok": 1},
    "youtu": {"pad_token_id": None},  # transformers zeroes that row of the embedding whenever it loads the model
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 16},
    "gemma4_text": {"vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 16, "global_head_dim": 32},
}
"""Fields of one `model_type`, over those above."""

DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")


TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "depth": 2,
    "num_heads": 2,
}
"""Config fields of vision and audio parts, which the graphs do not contain."""


def tiny_config(model_type: str, num_layers: int) -> Any:
    """The config of a tiny model with `num_layers` layers, or as many as `STATE_CONFIGS` says.

    Raises:
        Exception: whatever transformers raises of a config.
    """
    if model_type in STATE_CONFIGS:
        return AutoConfig.for_model(model_type, **STATE_CONFIGS[model_type])
    default = AutoConfig.for_model(model_type)
    if decoder_config(default) is default:
        return _tiny(default, num_layers, ODDITIES.get(model_type, {}))
    parts = {name: getattr(default, name) for name in default.sub_configs if getattr(default, name, None) is not None}
    text = _tiny(parts.pop("text_config"), num_layers, ODDITIES.get(decoder_config(default).model_type, {}))
    small = {name: {**part.to_dict(), **_known(part, TOWER)} for name, part in parts.items()}
    for name, fields in ODDITIES.get(model_type, {}).items():
        small[name] = {**small[name], **fields} if isinstance(fields, dict) else fields
    return AutoConfig.for_model(model_type, text_config=text.to_dict(), **small)


def _tiny(default: Any, num_layers: int, oddities: dict[str, Any]) -> Any:
    """A config of the class of `default`, small."""
    made = STATE_CONFIGS.get(default.model_type)
    if made is not None:
        return type(default)(**made)
    fields = _known(default, FIELDS) | _known(default, {name: num_layers for name in DEPTH})
    if "kv_lora_rank" in fields:  # latent attention: its keys have a head each, and `head_dim` is what rotates
        latent = {"num_key_value_heads": 4, "head_dim": FIELDS["qk_rope_head_dim"]}
        fields |= {name: value for name, value in latent.items() if name in fields}
    fields |= oddities
    config = type(default)(**fields)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if 1 < len(kinds) < period(config) and _known(default, {"layer_types": 0}) and "layer_types" not in fields:
        pattern = [kinds[layer % len(kinds)] for layer in range(num_layers)]  # each kind once: a short period
        config = type(default)(**fields, layer_types=pattern)
    return config


def _known(default: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Those of the fields that a config has under this name."""
    names = set(inspect.signature(type(default).__init__).parameters) | set(default.to_dict())
    return {name: value for name, value in fields.items() if name in names and name not in type(default).attribute_map}


def save_tiny(model_type: str, folder: Path, num_layers: int) -> Any:
    """Saves a seeded float32 model, every weight random; returns its config."""
    config = tiny_config(model_type, num_layers)
    torch.manual_seed(0)
    # A text model next to others is saved with them, as its checkpoints are.
    whole = decoder_config(config) is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    maker = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model = maker.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        stored = [module._buffers[name] for module, name in stored_buffers(model)]
        for tensor in [*model.parameters(), *stored]:
            moved = torch.randn_like(tensor) * 0.05
            tensor.add_(moved if tensor.numel() > 1 else moved * tensor)  # a single number may be an epsilon
    model.save_pretrained(folder)
    return config


def cast_weights(folder: Path, dtype: str) -> None:
    """Rounds the float weights of a saved model to a dtype, except those that transformers keeps in float32.

    Args:
        folder: with one `model.safetensors`, changed in place.
        dtype: `float16` or `bfloat16`.
    """
    path, fields = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        kept = kept_in_float32(_class_of(folder).from_config(AutoConfig.from_pretrained(folder)), getattr(torch, dtype))
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # not mapped: the file is replaced
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not (kept and kept.search(name)):
            tensors[name] = tensor.to(getattr(torch, dtype))
    save_file(tensors, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": dtype}))


def _class_of(folder: Path) -> Any:
    whole = type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


def depth(model_type: str) -> int:
    """Layers of the tiny model: five periods, of which an export traces three, after first layers that differ."""
    repeat, row = period(tiny_config(model_type, 24)), INPUT_MAPS.get(model_type)
    return 5 * repeat + (row.first_layers if row else 0) if repeat < 24 else 6
