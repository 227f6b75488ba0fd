"""Conversation: the tokens that were run and their cache, so that the next turn runs only what is new."""

from __future__ import annotations

from collections.abc import Sequence

from llmconv.runtime.runner import Cache


class Conversation:
    """One growing sequence; a prompt that does not begin with it starts afresh.

    Attributes:
        ids: tokens in the cache.
        cache: None before the first turn.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cache: Cache | None = None

    def past(self, prompt: Sequence[int]) -> Cache | None:
        """The cache, where `prompt` begins with its tokens and goes on; else None."""
        count = len(self.ids)
        goes_on = self.cache is not None and count < len(prompt) and list(prompt[:count]) == self.ids
        return self.cache if goes_on else None

    def keep(self, ids: Sequence[int], cache: Cache | None) -> None:
        """Takes what was run: the cache of the tokens `ids`."""
        self.ids, self.cache = list(ids), cache
