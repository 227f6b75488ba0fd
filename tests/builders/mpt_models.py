"""MPT of LLM Foundry made here: its formula in a few lines of torch, and Composer checkpoints of random weights."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

State = dict[str, torch.Tensor]

CONFIG: dict[str, Any] = {
    "model_type": "mpt",
    "d_model": 24,
    "n_heads": 3,
    "n_layers": 2,
    "max_seq_len": 32,
    "vocab_size": 40,
    "expansion_ratio": 4,
    "no_bias": True,
    "learned_pos_emb": False,
    "norm_type": "low_precision_layernorm",
    "norm_eps": 1e-5,
    "ffn_config": {"ffn_type": "mptmlp", "fc_type": {"name": "torch"}},
    "fc_type": {"name": "torch"},
    "init_config": {"name": "kaiming_normal_"},
    "attn_config": {"attn_impl": "torch", "attn_type": "multihead_attention", "alibi": True, "attn_pdrop": 0.0},
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28, 18, 28, 4, 5, 9]])


def config_with(attention: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """`CONFIG` with other fields, and other fields of its `attn_config`."""
    return {**CONFIG, **fields, "attn_config": {**CONFIG["attn_config"], **(attention or {})}}


def random_state(config: dict[str, Any]) -> State:
    """Weights of that configuration, large enough for every option to show in the logits."""
    torch.manual_seed(0)
    width, vocabulary = config["d_model"], config["vocab_size"]
    state = {"transformer.wte.weight": torch.randn(vocabulary, width)}
    for layer in range(config["n_layers"]):
        block = f"transformer.blocks.{layer}."
        state |= {f"{block}norm_{i}.weight": 1 + 0.1 * torch.randn(width) for i in (1, 2)}
        keys = 2 * key_heads(config) * (width // config["n_heads"])
        state[f"{block}attn.Wqkv.weight"] = 0.5 * torch.randn(width + keys, width)
        state[f"{block}attn.out_proj.weight"] = 0.5 * torch.randn(width, width)
        inner = config.get("ffn_config", {}).get("ffn_hidden_size") or int(config["expansion_ratio"] * width)
        state[f"{block}ffn.up_proj.weight"] = 0.3 * torch.randn(inner, width)
        state[f"{block}ffn.down_proj.weight"] = 0.3 * torch.randn(width, inner)
    return state | {"transformer.norm_f.weight": 1 + 0.1 * torch.randn(width)}


def key_heads(config: dict[str, Any]) -> int:
    """Number of heads of keys and values."""
    kind = config["attn_config"].get("attn_type")
    if kind == "grouped_query_attention":
        return int(config["attn_config"]["kv_n_heads"])
    return 1 if kind == "multiquery_attention" else int(config["n_heads"])


def foundry_logits(state: State, config: dict[str, Any], ids: torch.Tensor = IDS) -> torch.Tensor:
    """Logits as llm-foundry 8c8dd48f computes them with `attn_impl: torch`, in float64."""
    weights = {name: tensor.double() for name, tensor in state.items()}
    attention, epsilon = config["attn_config"], config.get("norm_eps", 1e-5)
    hidden = weights["transformer.wte.weight"][ids]
    for layer in range(config["n_layers"]):
        part = {
            name.removeprefix(block): tensor
            for name, tensor in weights.items()
            if name.startswith(block := f"transformer.blocks.{layer}.")
        }
        normed = functional.layer_norm(hidden, hidden.shape[-1:], part["norm_1.weight"], eps=epsilon)
        mixed = _attend(normed @ part["attn.Wqkv.weight"].T, config["n_heads"], key_heads(config), attention)
        hidden = hidden + mixed @ part["attn.out_proj.weight"].T
        normed = functional.layer_norm(hidden, hidden.shape[-1:], part["norm_2.weight"], eps=epsilon)
        hidden = hidden + functional.gelu(normed @ part["ffn.up_proj.weight"].T) @ part["ffn.down_proj.weight"].T
    hidden = functional.layer_norm(hidden, hidden.shape[-1:], weights["transformer.norm_f.weight"], eps=epsilon)
    return hidden @ weights.get("lm_head.weight", weights["transformer.wte.weight"]).T


def _attend(fused: torch.Tensor, heads: int, key_heads: int, attention: dict[str, Any]) -> torch.Tensor:
    """Causal attention with ALiBi over `fused` queries, keys and values (layers/attention.py)."""
    if clip := attention.get("clip_qkv"):
        fused = fused.clamp(-clip, clip)
    batch, length, _ = fused.shape
    size = fused.shape[-1] // (heads + 2 * key_heads)
    firsts = (0, size * heads, size * (heads + key_heads), size * (heads + 2 * key_heads))
    parts = [fused[..., start:stop] for start, stop in pairwise(firsts)]
    query, key, value = (part.view(batch, length, -1, size).transpose(1, 2) for part in parts)
    key, value = (part.repeat_interleave(heads // key_heads, 1) for part in (key, value))
    scale = attention.get("softmax_scale")
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    scores = scores + _slopes(heads, attention.get("alibi_bias_max", 8))[:, None, None] * distance
    scores = scores.masked_fill(distance > 0, -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1)


def _slopes(heads: int, maximum: float) -> torch.Tensor:
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** -(torch.arange(1, power + 1, dtype=torch.float64) * maximum / power)
    return slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


def save(path: Path, state: State, config: dict[str, Any]) -> Path:
    """A Composer checkpoint."""
    entry = {"config": {"file_extension": ".json", "content": config, "class": "llmfoundry.MPTForCausalLM"}}
    model = {f"model.{name}": tensor for name, tensor in state.items()}
    integrations = {"huggingface": {"model": entry, "tokenizer": {}}}
    torch.save({"state": {"model": model, "integrations": integrations}, "rng": []}, path)
    return path
