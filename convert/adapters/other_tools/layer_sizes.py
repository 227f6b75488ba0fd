"""Sizes of the layers of a base, which conversions of adapters need to split and reorder rows."""

from __future__ import annotations

from dataclasses import dataclass

from llmconv.checkpoint import Checkpoint
from llmconv.errors import InputRefused

NAMES = {
    "hidden": ("hidden_size", "n_embd"),
    "queries": ("num_attention_heads", "n_head"),
    "keys": ("num_key_value_heads", "num_kv_heads"),
    "dim": ("head_dim",),
    "inner": ("intermediate_size", "n_inner", "ffn_hidden_size"),
}
"""Their fields in the configs of transformers."""


@dataclass(frozen=True)
class LayerSizes:
    """Heads of queries and of keys/values, elements of a head, rows of the feed-forward."""

    queries: int
    keys: int
    dim: int
    inner: int

    @property
    def attention(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values."""
        return self.queries * self.dim, self.keys * self.dim, self.keys * self.dim


def sizes_of(base: Checkpoint) -> LayerSizes:
    """The sizes in the base's config.

    Raises:
        InputRefused: they are missing or impossible.
    """
    config = base.config
    found = {size: next((config[name] for name in names if config.get(name)), 0) for size, names in NAMES.items()}
    if all(type(value) is int and 0 <= value < 1 << 31 for value in found.values()) and found["queries"]:
        dim = found["dim"] or found["hidden"] // found["queries"]
        if dim and not dim % 2:
            return LayerSizes(
                found["queries"], found["keys"] or found["queries"], dim, found["inner"] or 4 * found["hidden"]
            )
    raise InputRefused(
        f"the `config.json` of `{base.path.name}` does not contain the sizes of its heads",
        hint="give the base that the adapter was trained on, with its own `config.json`",
    )
