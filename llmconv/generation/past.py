"""Past: the cache of tokens that have run; and the type of a rule for position ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmconv.runtime.runner import Cache
from llmconv.tensors import Array

PositionRule = Callable[[Array, int], Array]
"""Attention mask and number of new tokens to position ids, as `default_positions`."""


@dataclass(frozen=True)
class Past:
    """The cache of the first `tokens` columns of a batch, padding included."""

    cache: Cache
    tokens: int
