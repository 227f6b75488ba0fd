"""Past: the cache of the tokens that have run."""

from __future__ import annotations

from dataclasses import dataclass

from llmconv.runtime.runner import Cache


@dataclass(frozen=True)
class Past:
    """The cache of the first `tokens` columns of a batch, padding included."""

    cache: Cache
    tokens: int
