"""Paddle checkpoints made by the tests: one whole Llama in Paddle's layout, cut as PaddleNLP cuts."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).parents[1] / "fixtures" / "paddle"

Model = dict[str, np.ndarray[Any, Any]]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
ROWS = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight")


def whole_model(kv_heads: int = 2) -> Model:
    """A seeded Llama in Paddle's names; heads of 2, weights (in, out)."""
    shapes: dict[str, tuple[int, ...]] = {"llama.embed_tokens.weight": (16, 8), "llama.norm.weight": (8,)}
    for layer in range(2):
        attention, feed = f"llama.layers.{layer}.self_attn.", f"llama.layers.{layer}.mlp."
        shapes |= {f"{attention}q_proj.weight": (8, 8), f"{attention}o_proj.weight": (8, 8)}
        shapes |= {f"{attention}{name}_proj.weight": (8, 2 * kv_heads) for name in "kv"}
        shapes |= {f"{feed}gate_proj.weight": (8, 12), f"{feed}up_proj.weight": (8, 12)}
        shapes |= {f"{feed}down_proj.weight": (12, 8)}
        shapes |= {f"llama.layers.{layer}.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    random = np.random.default_rng(0)
    shapes["lm_head.weight"] = (8, 16)
    return {name: random.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


def fused(model: Model, ranks: int) -> list[Model]:
    """`model` cut over `ranks`, with qkv by key/value head and [gate | up] in each."""
    parts = [cut(model, ranks, rank, 2) for rank in range(ranks)]
    for part in parts:
        for layer in range(2):
            attention, feed = f"llama.layers.{layer}.self_attn.", f"llama.layers.{layer}.mlp."
            q, k, v = (part.pop(f"{attention}{name}_proj.weight") for name in "qkv")
            heads = [np.split(array, 2 // ranks, axis=1) for array in (q, k, v)]
            part[f"{attention}qkv_proj.weight"] = np.concatenate(
                [piece for group in zip(*heads, strict=True) for piece in group], axis=1
            )
            gate_up = [part.pop(f"{feed}{name}_proj.weight") for name in ("gate", "up")]
            part[f"{feed}gate_up_fused_proj.weight"] = np.concatenate(gate_up, axis=1)
    return parts


def cut(model: Model, ranks: int, rank: int, kv_heads: int) -> Model:
    """What one tensor-parallel rank holds; key and value stay whole where their heads do not divide."""

    def part(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if name.endswith("norm.weight") or (name.endswith(("k_proj.weight", "v_proj.weight")) and kv_heads % ranks):
            return array
        return np.ascontiguousarray(np.split(array, ranks, axis=0 if name.endswith(ROWS) else 1)[rank])

    return {name: part(name, array) for name, array in model.items()}


def save(folder: Path, files: Mapping[str, Model], protocol: int = 4, **changes: Any) -> Path:
    """Writes `files` as `paddle.save` does, beside a config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    for name, model in files.items():
        table = {"StructuredToParameterName@@": {key: f"linear_{n}.w_0" for n, key in enumerate(model)}}
        (folder / name).write_bytes(pickle.dumps({**model, **table}, protocol))
    return folder


def save_whole(folder: Path, model: Model, **changes: Any) -> Path:
    return save(folder, {"model_state.pdparams": model}, **changes)


def contents(checkpoint: Any) -> dict[str, bytes]:
    return {name: tensor.read().tobytes() for name, tensor in checkpoint.items()}
