"""Shapes of a state dict in Hugging Face names against its configuration, where the model type's shapes are known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmconv.convert.mapping import listing
from llmconv.convert.state_dict import EMBEDDINGS
from llmconv.errors import MalformedInput
from llmconv.tensors import LazyTensor

HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads")
OTHER_WIDTHS = ("word_embed_proj_dim", "embedding_size", "embedding_dim")
"""Fields of models whose embedding is not as wide as the model."""

LLAMA_LIKE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "phi3")
MATRIX = re.compile(r"\.(?:self_attn|mlp|attn)\.(\w+)\.weight$")

Sizes = dict[str, tuple[int | None, int | None]]


def integer(config: Mapping[str, Any], *fields: str) -> int | None:
    """The first of `fields` that the configuration has as a positive number."""
    return next((config[name] for name in fields if type(config.get(name)) is int and config[name] > 0), None)


def head_dim(config: Mapping[str, Any]) -> int | None:
    """Elements of one attention head: `head_dim`, or the hidden size over the heads."""
    hidden, heads = integer(config, *HIDDEN), integer(config, *HEADS)
    return integer(config, "head_dim") or (hidden // heads if hidden and heads else None)


def check_sizes(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> None:
    """Every matrix whose shape the configuration gives has that shape.

    Raises:
        MalformedInput: lists those that have not, with their shapes.
    """
    expected = _matrices(config)
    hidden = None if any(config.get(field) for field in OTHER_WIDTHS) else integer(config, *HIDDEN)
    wrong = []
    for name, tensor in tensors.items():
        match = MATRIX.search(name)
        sizes = (None, hidden) if name.endswith(EMBEDDINGS) else expected.get(match[1]) if match else None
        if sizes and not _fits(tensor.shape, sizes):
            wrong.append(f"{name} {list(tensor.shape)}")
    if wrong:
        raise MalformedInput(
            f"`{source}` has {len(wrong)} tensors of another shape than its configuration says: {listing(wrong)}",
            hint="the configuration is of another model; give the right one with `--config`",
        )


def _fits(shape: tuple[int, ...], sizes: tuple[int | None, int | None]) -> bool:
    return len(shape) == 2 and all(size in (None, found) for found, size in zip(shape, sizes, strict=True))


def _matrices(config: Mapping[str, Any]) -> Sizes:
    """Rows and columns by module name; None where the configuration does not say."""
    hidden, inner = integer(config, *HIDDEN), integer(config, "intermediate_size", "n_inner")
    if config.get("model_type") == "gpt2" and hidden:
        inner = inner or 4 * hidden
        return {"c_attn": (hidden, 3 * hidden), "c_fc": (hidden, inner)}
    heads, dim = integer(config, *HEADS), head_dim(config)
    if config.get("model_type") not in LLAMA_LIKE or not (hidden and heads and dim):
        return {}
    rows = heads * dim
    keys = (integer(config, "num_key_value_heads") or heads) * dim
    feed = (inner, hidden)
    return {
        "q_proj": (rows, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, rows),
        "qkv_proj": (rows + 2 * keys, hidden),
        "gate_proj": feed,
        "up_proj": feed,
        "gate_up_proj": (2 * inner if inner else None, hidden),
        "down_proj": (hidden, inner),
    }
