"""Texts of several streams in one call of the model, which rows join and leave between steps ("continuous batching").

A call with n rows takes less time than n calls, because it reads the weights once. Each stream asks for its next piece
in turn; where none is left, one step runs all rows, and the others find theirs. A row that is alone runs as in
`loop.Batch`, with tokens that are guessed.

Every text is the same as alone: a greedy choice between two scores that rounding could exchange is made by a call of
that row by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from llmconv.generation.loop import ROUNDING, Batch, SharedSteps
from llmconv.generation.row import Past, PositionRule, Row, TextPiece
from llmconv.runtime.extra_inputs import ModelCall
from llmconv.runtime.onnxruntime.joined_cache import JoinedCache, can_be_joined
from llmconv.runtime.runner import Runner, Step, default_positions


class Member:
    """The stream of one row: `batch` runs it while it is alone; `error` ends it."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.row = batch, batch.rows[0]
        self.pieces: deque[TextPiece] = deque()
        self.error: Exception | None = None


class SharedBatch(SharedSteps):
    """The rows that run together on one runner; for one thread."""

    def __init__(self, runner: Runner, positions: PositionRule = default_positions) -> None:
        self._runner, self._positions = runner, positions
        self._members: list[Member] = []
        self._joined: list[Member] = []  # in the order of the rows of the cache
        self._cache: JoinedCache | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the graphs let rows run together that begin and end at different times."""
        runner = self._runner
        has_fixed_size = runner.max_batch_size is not None or runner.cache_capacity is not None
        return bool(not (has_fixed_size or runner.virtual_tokens or runner.extra_inputs) and runner.runs_rows_apart)

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether these rows, which run together until then, are one that may run with others."""
        if len(rows) != 1 or not self.is_possible:
            return False
        (row,) = rows
        return not row.embeddings and self._runner.reads_in_parts(row.length + row.room)

    def rest(self, batch: Batch) -> Iterator[TextPiece]:
        """The pieces of the only row of `batch`, whose prompt has run; one `next()` runs one step, or a few.

        At the end, or when it is closed, `batch` has the row's own cache again.
        """
        member = Member(batch)
        self._members.append(member)
        try:
            while member.pieces or not member.row.finish:
                if not member.pieces:
                    self._run(member)
                if member.error and not member.pieces:
                    raise member.error
                yield member.pieces.popleft()
        finally:
            self._members.remove(member)
            self._part(member)

    def _run(self, asking: Member) -> None:
        """Runs the next step of a row, with all others that have not ended."""
        for member in [one for one in self._joined if one.row.finish or one.error]:
            self._part(member)
        going = [member for member in self._members if not member.row.finish and not member.error]
        if len(going) > 1:
            for member in going:
                self._join(member)
        if asking in self._joined and len(self._joined) > 1:
            self._step()
        elif not asking.row.finish:
            self._part(asking)
            asking.pieces.extend(asking.batch.advance(asking.batch.step()))

    def _join(self, member: Member) -> None:
        """Adds a row to those that run together, unless its cache cannot be joined."""
        batch = member.batch
        if member in self._joined:
            return
        while not batch.is_settled and not member.row.finish:
            member.pieces.extend(batch.advance(batch.step(guesses=False)))
        assert batch.past
        if member.row.finish or not can_be_joined(batch.past.cache):
            return
        self._cache = self._cache or JoinedCache.like(batch.past.cache)
        self._cache.add(batch.past.cache)
        self._joined.append(member)
        batch.past = None

    def _part(self, member: Member) -> None:
        """Gives a row its own cache back."""
        if member not in self._joined:
            return
        assert self._cache
        at, tokens = self._joined.index(member), self._cache.lengths[self._joined.index(member)]
        member.batch.past = Past(self._cache.take(at), tokens)
        self._joined[at] = self._joined[-1]
        self._joined.pop()
        if not self._joined:
            self._cache = None

    def _step(self) -> None:
        """One token of every row; an error that belongs to a row ends that row alone."""
        cache = self._cache
        assert cache
        ids = np.stack([member.row.all_ids[-1:] for member in self._joined])
        mask = cache.mask()
        call = ModelCall(ids, mask, self._positions(mask, 1))
        step = self._runner.decode(*call.arrays, cache.past())
        cache.grew(step.present)
        for at, member in enumerate(self._joined):
            row, number = member.row, member.row.length - 1
            try:
                token = row.pick(step, at, rounding=ROUNDING)
                if token is None:
                    token = row.pick(self._alone(cache, at, call), 0)
                assert token is not None
                member.pieces.append(row.push(token))
                if step.hidden is not None:
                    member.batch.hear(number, step.hidden[at])
            except Exception as error:
                member.error = error

    def _alone(self, cache: JoinedCache, at: int, call: ModelCall) -> Step:
        """The same step of one row by itself."""
        ids, mask, positions = (array[at : at + 1] for array in call.arrays)
        return self._runner.decode(ids, mask, positions, cache.before(at))
