"""Caches of tokens that have run, so that only new tokens run: of a conversation, or of a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llmconv.generation.loop import pad_left
from llmconv.generation.positions import Past, PositionRule
from llmconv.runtime.array_cache import can_be_cut, cut, is_lost, moved_right, rows_of
from llmconv.runtime.runner import Cache, Runner, default_positions


class PrefixCache(Protocol):
    """A cache of the first columns of a batch, which then do not run again."""

    def past(self, prompts: Sequence[Sequence[int]], runner: Runner) -> Past | None:
        """The cache for the start of the left-padded prompts, shorter than the longest one; None if there is none."""

    def keep(self, ids: Sequence[int] = (), cache: Cache | None = None) -> None:
        """Stores the cache of the tokens `ids` after a single prompt; without arguments after an interrupted step."""


class Conversation:
    """One growing sequence; the tokens that the next prompt shares with it do not run again.

    Attributes:
        ids: tokens in the cache.
        cache: None before the first turn.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cache: Cache | None = None

    def past(self, prompts: Sequence[Sequence[int]], runner: Runner) -> Past | None:
        """The cache, cut to the tokens that the one prompt begins with; None if the cache cannot be cut there."""
        if self.cache is None or len(prompts) != 1 or is_lost(self.cache):
            return None
        if not runner.reads_in_parts(max(len(self.ids), len(prompts[0]))):
            return None  # other frequencies than those of the whole prompt
        same = common_length([self.ids, prompts[0]], most=len(prompts[0]) - 1)
        if same == 0 or not runner.continues_in_one_run(1, same, len(prompts[0]) - same):
            return None
        if same == len(self.ids):
            return Past(self.cache, same)
        return Past(cut(self.cache, runner.virtual_tokens + same), same) if can_be_cut(self.cache) else None

    def keep(self, ids: Sequence[int] = (), cache: Cache | None = None) -> None:
        """Stores the cache of the tokens `ids`."""
        self.ids, self.cache = list(map(int, ids)), cache


class SharedPrefix:
    """Tokens that many prompts begin with; they run only once.

    Args:
        ids: the tokens.
        positions: the model's rule for position ids.
    """

    def __init__(self, ids: Sequence[int], positions: PositionRule = default_positions) -> None:
        self._ids, self._positions = list(ids), positions
        self._cache: Cache | None = None

    def past(self, prompts: Sequence[Sequence[int]], runner: Runner) -> Past | None:
        """The cache, with one row per prompt, each after the padding of that row."""
        longest = max(map(len, prompts))
        same = common_length([self._ids, *prompts], most=min(map(len, prompts)) - 1)
        in_parts = same > 0 and runner.reads_in_parts(longest)
        if not in_parts or not runner.continues_in_one_run(len(prompts), same, longest - same):
            return None
        cache = self._run(runner)
        shifts = [longest - len(prompt) for prompt in prompts]
        if same == len(self._ids) and not any(shifts):
            return Past(rows_of(cache, [0] * len(prompts)), same)
        if not can_be_cut(cache):
            return None
        virtual = runner.virtual_tokens
        return Past(moved_right(cut(cache, virtual + same), shifts, virtual), same)

    def keep(self, ids: Sequence[int] = (), cache: Cache | None = None) -> None:
        """Does nothing: the prefix stays the same."""

    def _run(self, runner: Runner) -> Cache:
        if self._cache is None or is_lost(self._cache):
            ids, mask = pad_left([self._ids])
            present = runner.prefill(ids, mask, self._positions(mask, len(self._ids)), None).present
            self._cache = rows_of(present, [0])  # a copy: some runners reuse the memory
        return self._cache


def common_length(sequences: Sequence[Sequence[int]], most: int) -> int:
    """Number of first tokens that all sequences share, at most `most`."""
    same = 0
    for tokens in zip(*sequences, strict=False):
        if same >= most or len(set(tokens)) > 1:
            break
        same += 1
    return same
