"""Tiny models with layers that predict further tokens (MTP), under the names that published checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

State = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
HEADS: dict[str, Any] = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
LINEAR: dict[str, Any] = {**HEADS, "linear_num_value_heads": 4, "num_hidden_layers": 3, "full_attention_interval": 2}
WINDOWS: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**SIZES, **EXPERTS, **LATENT, "num_key_value_heads": 4, "v_head_dim": 8, "n_shared_experts": 1},
    "glm4_moe": {**SIZES, **EXPERTS, **GROUPED, "n_shared_experts": 1},
    "mellum": {**SIZES, **GROUPED, **WINDOWS, "num_experts": 4, "num_nextn_predict_layers": 1},
    "qwen3_next": {**SIZES, **GROUPED, **LINEAR, "num_experts": 4},
    "qwen3_5_text": {**SIZES, **GROUPED, **LINEAR},
}
AFTER_THE_LAST = ("deepseek_v3", "glm4_moe")  # whose head is one more layer; those of others are named `mtp.`


def save_with_head(folder: Path, kind: str, **changes: Any) -> State:
    """Saves a seeded model with an MTP head; returns the tensors of the head by name.

    The block of the head is that of one more layer.

    Args:
        folder: where to put the model.
        kind: its `model_type`.
        changes: fields of its configuration.
    """
    fields = {**FIELDS[kind], **changes}
    layers, size = fields["num_hidden_layers"], fields["hidden_size"]
    longer = {"num_hidden_layers": layers + 1}
    longer |= {"layer_types": [*fields["layer_types"], fields["layer_types"][-1]]} if "layer_types" in fields else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**fields, **longer}))
    model.save_pretrained(folder)
    AutoConfig.for_model(kind, **fields, architectures=[type(model).__name__]).save_pretrained(folder)
    is_layer = kind in AFTER_THE_LAST
    start = f"model.layers.{layers}." if is_layer else "mtp.layers.0."
    own = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "embed_tokens", "shared_head.head") if is_layer else ()
    names = [f"{start}{one}.weight" for one in own] or [
        f"mtp.{one}.weight" for one in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    ]
    state = load_file(folder / "model.safetensors")
    state = {name.replace(f"model.layers.{layers}.", start): torch.empty_like(one) for name, one in state.items()}
    state |= dict(zip(names, [torch.empty(size, 2 * size), *([torch.empty(size)] * 3)], strict=False))
    torch.manual_seed(5)
    state = {name: torch.randn(one.shape) * 0.25 + (one.dim() == 1) for name, one in state.items()}
    state |= zip(names[4:], (state["model.embed_tokens.weight"].clone(), state["lm_head.weight"].clone()), strict=False)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return {name: one for name, one in state.items() if name.startswith(("mtp.", f"model.layers.{layers}."))}


def to_float8(folder: Path, block: int = 16) -> None:
    """Makes the projections of a folder codes, as DeepSeek's `fp8_cast`: float8 and a scale for each block."""
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config["quantization_config"] = {**settings, "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight") and "eh_proj" not in name]:
        weight = tensors[name]
        rows, columns = (-(-size // block) for size in weight.shape)
        padded = torch.zeros(rows * block, columns * block)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.view(rows, block, columns, block)
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-8) / 448
        codes = (blocks / scales[:, None, :, None]).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]
        tensors |= {name: codes.to(torch.float8_e4m3fn).contiguous(), f"{name}_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
