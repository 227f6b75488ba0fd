"""Tokens that were run and their cache, so that only what is new is run: of a conversation, or of a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from llmconv.generation.loop import goes_on, pad_left
from llmconv.generation.past import Past, PositionRule
from llmconv.runtime.array_cache import can_be_cut, cut, moved_right, rows_of
from llmconv.runtime.runner import Cache, Runner, default_positions


class PrefixCache(Protocol):
    """What may spare a batch the run of its first columns."""

    def past(self, prompts: Sequence[Sequence[int]], runner: Runner) -> Past | None:
        """What of the left-padded prompts was run; less than the longest of them."""

    def keep(self, ids: Sequence[int] = (), cache: Cache | None = None) -> None:
        """Takes the cache of the tokens `ids`, once a single prompt has ended; none where a step broke off."""


class Conversation:
    """One growing sequence; what a next prompt has in common with its beginning is not run again.

    Attributes:
        ids: tokens in the cache.
        cache: None before the first turn.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cache: Cache | None = None

    def past(self, prompts: Sequence[Sequence[int]], runner: Runner) -> Past | None:
        """The cache as far as the one prompt begins with its tokens; a cache that cannot be cut goes whole or not."""
        if self.cache is None or len(prompts) != 1:
            return None
        same = common_length([self.ids, prompts[0]], most=len(prompts[0]) - 1)
        if same == 0 or not goes_on(runner, 1, same, len(prompts[0]) - same):
            return None
        if same == len(self.ids):
            return Past(self.cache, same)
        return Past(cut(self.cache, virtual_tokens(runner) + same), same) if can_be_cut(self.cache) else None

    def keep(self, ids: Sequence[int] = (), cache: Cache | None = None) -> None:
        """Takes what was run: the cache of the tokens `ids`."""
        self.ids, self.cache = list(map(int, ids)), cache


class SharedPrefix:
    """Tokens that many prompts begin with, run once.

    Args:
        ids: the tokens.
        positions: rule of the model's position ids.
    """

    def __init__(self, ids: Sequence[int], positions: PositionRule = default_positions) -> None:
        self._ids, self._positions = list(ids), positions
        self._cache: Cache | None = None

    def past(self, prompts: Sequence[Sequence[int]], runner: Runner) -> Past | None:
        """Its cache in as many rows as there are prompts, each behind the padding of its row."""
        longest = max(map(len, prompts))
        same = common_length([self._ids, *prompts], most=min(map(len, prompts)) - 1)
        if same == 0 or not goes_on(runner, len(prompts), same, longest - same):
            return None
        cache = self._run(runner)
        shifts = [longest - len(prompt) for prompt in prompts]
        if same == len(self._ids) and not any(shifts):
            return Past(rows_of(cache, [0] * len(prompts)), same)
        if not can_be_cut(cache):
            return None
        virtual = virtual_tokens(runner)
        return Past(moved_right(cut(cache, virtual + same), shifts, virtual), same)

    def keep(self, ids: Sequence[int] = (), cache: Cache | None = None) -> None:
        """It stays what it is."""

    def _run(self, runner: Runner) -> Cache:
        if self._cache is None:
            ids, mask = pad_left([self._ids])
            present = runner.prefill(ids, mask, self._positions(mask, len(self._ids)), None).present
            self._cache = rows_of(present, [0])  # a copy: some runners go on in the same memory
        return self._cache


def common_length(sequences: Sequence[Sequence[int]], most: int) -> int:
    """How many of their first tokens all sequences share, at most `most`."""
    same = 0
    for tokens in zip(*sequences, strict=False):
        if same >= most or len(set(tokens)) > 1:
            break
        same += 1
    return same


def virtual_tokens(runner: Any) -> int:
    """Slots of a cache before the first token of a prompt."""
    return int(getattr(runner, "virtual_tokens", 0))
