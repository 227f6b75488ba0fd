"""State dicts for the tests of plain torch formats: a tiny Llama and a GPT-2, and how to save them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FIXTURES = Path(__file__).parents[1] / "fixtures"

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 16,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 8,
}


def llama_state() -> dict[str, torch.Tensor]:
    """A seeded Llama of `LLAMA`, with its own head."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8)}
    for layer in (f"model.layers.{number}" for number in range(2)):
        shapes |= {f"{layer}.self_attn.{one}_proj.weight": (4 if one in "kv" else 8, 8) for one in "qkvo"}
        shapes |= {f"{layer}.mlp.gate_proj.weight": (12, 8), f"{layer}.mlp.up_proj.weight": (12, 8)}
        shapes |= {f"{layer}.mlp.down_proj.weight": (8, 12), f"{layer}.input_layernorm.weight": (8,)}
        shapes |= {f"{layer}.post_attention_layernorm.weight": (8,)}
    shapes["model.norm.weight"] = (8,)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def gpt2_base_state() -> dict[str, torch.Tensor]:
    """A seeded GPT-2 of `GPT2` without its head: `h.0…` and no `transformer.`."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (16, 8), "wpe.weight": (8, 8)}
    for layer in (f"h.{number}" for number in range(2)):
        shapes |= {f"{layer}.attn.c_attn.weight": (8, 24), f"{layer}.attn.c_attn.bias": (24,)}
        shapes |= {f"{layer}.attn.c_proj.weight": (8, 8), f"{layer}.attn.c_proj.bias": (8,)}
        shapes |= {f"{layer}.mlp.c_fc.weight": (8, 32), f"{layer}.mlp.c_fc.bias": (32,)}
        shapes |= {f"{layer}.mlp.c_proj.weight": (32, 8), f"{layer}.mlp.c_proj.bias": (8,)}
        shapes |= {f"{layer}.ln_{number}.{kind}": (8,) for number in (1, 2) for kind in ("weight", "bias")}
    shapes |= {"ln_f.weight": (8,), "ln_f.bias": (8,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def save(path: Path, content: Any, config: Mapping[str, Any] | None = LLAMA) -> Path:
    """Saves `content` with torch, and `config.json` beside it unless it is None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path


def prefixed(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The state dict with `prefix` in front of every name."""
    return {prefix + name: tensor for name, tensor in state.items()}
