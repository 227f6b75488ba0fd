"""The loop of greedy search and sampling: a prefill, then one step of the model per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llmconv.generation.row import Piece, Row
from llmconv.runtime.runner import Cache, Runner, Step, default_positions
from llmconv.tensors import Array


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Ids and mask, both int64 [batch, longest prompt], with the padding (id 0) on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


class Batch:
    """Rows that grow side by side; those that have ended make room once they are half of all.

    Attributes:
        cache: of what was run.
        rows: that are still in it.
    """

    def __init__(self, runner: Runner, rows: Sequence[Row]) -> None:
        self._runner = runner
        self.rows = [row for row in rows if not row.finish]
        self.cache: Cache | None = None
        longest = max((row.length for row in self.rows), default=0)
        self._columns = longest
        self._mask = np.ones(
            (len(self.rows), longest + max((row.room for row in self.rows), default=0)), dtype=np.int64
        )

    def start(self, past: Cache | None = None) -> Step:
        """Runs the prompts."""
        ids, mask = pad_left([row.prompt for row in self.rows])
        self._mask[:, : self._columns] = mask
        done = past.length if past else 0
        step = self._runner.prefill(ids[:, done:], mask, default_positions(mask, ids.shape[1])[:, done:], past)
        self._positions = mask.sum(axis=1, keepdims=True)
        self.cache = step.present
        return step

    def step(self) -> Step:
        """Runs the latest token of every row."""
        ids = np.array([[row.last] for row in self.rows], dtype=np.int64)
        self._columns += 1
        step = self._runner.decode(ids, self._mask[:, : self._columns], self._positions, self.cache)
        self._positions = self._positions + 1
        self.cache = step.present
        return step


def grow(batch: Batch, past: Cache | None = None) -> Iterator[Piece]:
    """Pieces of every row, in turn, until all have ended; one `next()` runs at most one step of the model."""
    step = batch.start(past)
    while True:
        for at, row in enumerate(batch.rows):
            if not row.finish:
                yield row.advance(step, at)
        if all(row.finish for row in batch.rows):
            return
        step = batch.step()
