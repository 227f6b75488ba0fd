"""The loop of greedy search and sampling: a prefill, then one step of the model per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llmconv.generation.positions import Past, PositionRule
from llmconv.generation.row import Row, TextPiece
from llmconv.runtime.array_cache import rows_of
from llmconv.runtime.extra_inputs import ModelCall
from llmconv.runtime.extra_values import ExtraValues
from llmconv.runtime.given_inputs import batch_values
from llmconv.runtime.placed_embeddings import PlacedEmbeddings
from llmconv.runtime.runner import Runner, Step, default_positions
from llmconv.tensors import Array


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Ids and attention mask, both int64 [batch, longest prompt], padded with id 0 on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


class Batch:
    """Rows generated together after the cache `past`; ended rows are removed once they are half of all."""

    def __init__(self, runner: Runner, rows: Sequence[Row], positions: PositionRule = default_positions) -> None:
        self._runner, self._position_ids = runner, positions
        self._may_shrink = runner.max_batch_size is None
        self.rows = [row for row in rows if not row.finish]
        self.past: Past | None = None
        columns = max((row.length + row.room for row in self.rows), default=0)
        self._mask = np.ones((len(self.rows), columns), dtype=np.int64)
        self._ids, self._most = self._mask[:, :0], 0
        self._placed: PlacedEmbeddings | None = None
        self._longest = max((len(row.prompt) for row in self.rows), default=0)

    def start(self, past: Past | None = None, most: int = 0) -> None:
        """Pads the prompts, which `read` then runs after `past`, at most `most` columns per step; 0 for all."""
        self._ids, mask = pad_left([row.prompt for row in self.rows])
        self._placed = PlacedEmbeddings.of(
            [row.embeddings for row in self.rows], [len(row.prompt) for row in self.rows]
        )
        self._mask = np.concatenate([mask, np.ones_like(self._mask)], axis=1)
        self.past = past
        done = past.tokens if past else 0
        in_parts = (
            most
            and not any(map(self._reads_whole, self.rows))
            and self._runner.reads_in_parts(self._ids.shape[1])
            and self._runner.continues_in_one_run(len(mask), done + most, most)
        )
        self._most = most if in_parts else self._ids.shape[1]

    def _reads_whole(self, row: Row) -> bool:
        """Whether tokens of a prompt attend to later ones."""
        of_images = row.embeddings is not None and row.embeddings.read_whole
        return of_images or ExtraValues(self._runner.extra_inputs, row.inputs.values).both_ways

    def read(self) -> Step | None:
        """Runs the next columns of the prompts; None while more remain."""
        past, longest = self.past, self._ids.shape[1]
        done = past.tokens if past else 0
        end = min(done + self._most, longest)
        mask = self._mask[:, :end]
        call = ModelCall(self._ids[:, done:end], mask, self._position_ids(mask, end - done))
        given = *call.arrays, past.cache if past else None
        placed = self._placed.columns(done, end) if self._placed else None
        runner, extras = self._runner, self._extras(call)
        step = runner.prefill(*given, extras, placed)
        self.past = Past(step.present, end)
        return step if end == longest else None

    def step(self) -> Step:
        """Runs the latest token of every row."""
        assert self.past
        if self._may_shrink:
            self._shrink()
        if len(self.rows) == 1 and self._runner.reads_again(self.past.tokens):
            return self._read_again(self.rows[0])
        ids = np.array([[row.last] for row in self.rows], dtype=np.int64)
        columns = self.past.tokens + 1
        mask = self._mask[:, :columns]
        call = ModelCall(ids, mask, self._position_ids(mask, 1))
        step = self._runner.decode(*call.arrays, self.past.cache, self._extras(call))
        self.past = Past(step.present, columns)
        return step

    def _read_again(self, row: Row) -> Step:
        """Runs a whole row that outgrows the original context, as transformers does, see `LengthSwitch`."""
        ids = row.all_ids[None]
        mask = self._mask[:, : ids.shape[1]]
        call = ModelCall(ids, mask, self._position_ids(mask, ids.shape[1]))
        step = self._runner.prefill(*call.arrays, None, self._extras(call), self._placed)
        self.past = Past(step.present, ids.shape[1])
        return step

    def _extras(self, call: ModelCall) -> dict[str, Array]:
        """The values of the extra inputs that prompts give."""
        return batch_values([row.inputs for row in self.rows], call, self._longest, self._runner.extra_inputs)

    def _shrink(self) -> None:
        """Removes ended rows once they are half of all: each removal copies the cache."""
        kept = [at for at, row in enumerate(self.rows) if not row.finish]
        if self.past and len(kept) <= len(self.rows) // 2:
            self.rows = [self.rows[at] for at in kept]
            self._mask = self._mask[kept]
            self.past = Past(rows_of(self.past.cache, kept), self.past.tokens)


def grow(batch: Batch, past: Past | None = None, most: int = 0) -> Iterator[TextPiece]:
    """The pieces of all rows, in turn, until all have ended; one `next()` runs at most one step of the model.

    Prompts run after the columns `past`, at most `most` columns per step, 0 for all; each step but the last yields an
    empty piece.
    """
    batch.start(past, most)
    while (step := batch.read()) is None:
        yield TextPiece(batch.rows[0].index, "", None, "")
    while True:
        for at, row in enumerate(batch.rows):
            if not row.finish:
                yield row.advance(step, at)
        if all(row.finish for row in batch.rows):
            return
        step = batch.step()
