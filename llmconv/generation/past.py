"""Past: tokens that were run already, and the rule of position ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmconv.runtime.runner import Cache
from llmconv.tensors import Array

PositionRule = Callable[[Array, int], Array]
"""Mask and number of new tokens to position ids, as `default_positions`."""


@dataclass(frozen=True)
class Past:
    """What was run already: the first `tokens` columns of a batch, padding included."""

    cache: Cache
    tokens: int
