"""Runner: what the graphs and the eager model have in common, two methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llmconv.tensors import Array


class Cache(Protocol):
    """What every layer keeps, wherever the runner keeps it."""

    @property
    def length(self) -> int:
        """Tokens in the cache, padding included."""

    def arrays(self) -> Mapping[str, Array]:
        """As numpy arrays by the names of the graph's outputs and in their order, see `cache_names`.

        Keys and values are [batch, kv_heads, length, head_dim]; states begin with [batch, …].
        """


@dataclass(frozen=True)
class Choices:
    """The likeliest tokens, likeliest first, as the graph itself chose them.

    Attributes:
        tokens: int64 [batch, new tokens, K].
        scores: their log-probabilities over the whole vocabulary, [batch, new tokens, K].
    """

    tokens: Array
    scores: Array


@dataclass(frozen=True)
class Step:
    """The outputs of one call.

    Attributes:
        logits: [batch, new tokens, vocabulary] (one row when the graph gives the last logits only); of no use where
            there are `choices`.
        present: the cache, past and new tokens together; the next call's `past`.
        choices: what the graph gives instead of logits; None where it gives logits.
    """

    logits: Array
    present: Cache
    choices: Choices | None = None


class Runner(Protocol):
    """A model that continues a cache by any number of tokens."""

    def prefill(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Runs the prompt.

        Args:
            input_ids: [batch, new tokens] int64.
            attention_mask: [batch, past + new tokens] int64, 0 where a token is padding.
            position_ids: [batch, new tokens] int64; ignored by models that take none.
            past: the cache to continue, None for an empty one.
        """

    def decode(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Runs a step of the generation; same arguments as `prefill`."""


def default_positions(attention_mask: Array, new_tokens: int) -> Array:
    """Positions of the last `new_tokens` tokens, counting those that are not padding; int64 [batch, new_tokens].

    The rule of transformers' `generate`: cumulative sum of the mask, less one.
    """
    positions: Array = np.maximum(attention_mask.cumsum(axis=1, dtype=np.int64) - 1, 0)
    return positions[:, positions.shape[1] - new_tokens :]
