"""Paced: the rows of a verification one after the other, as far as a budget of time allows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from llmconv.progress import status
from llmconv.verify.scenarios.budget import Budget, Named, tokens_of
from llmconv.verify.scenarios.calls import Chain

Row = TypeVar("Row", bound=Named)


class Paced(Generic[Row]):
    """Iterates over the rows that run now, and measures each until the next one is asked for.

    Args:
        rows: with their calls, in order.
        budget: decides which of them run; None for all.
        reopens: each row opens model and graphs again.

    Attributes:
        left: the rows that did not run, after the iteration.
    """

    def __init__(
        self, rows: Iterable[tuple[Row, list[Chain]]], budget: Budget | None, *, reopens: bool = False
    ) -> None:
        self._rows, self._budget, self._reopens = rows, budget, reopens
        self.left: list[Row] = []

    def __iter__(self) -> Iterator[tuple[Row, list[Chain]]]:
        budget = self._budget
        if budget is None:
            yield from self._shown()
            return
        if budget.opening is None:
            budget.opening = budget.used
        for row, chains in self._rows:
            tokens = tokens_of(chains)
            if not budget.admits(row.name, tokens, reopens=self._reopens):
                self.left.append(row)
                budget.left[row.name] = None
                continue
            begin = budget.clock()
            yield row, chains
            budget.record(row.name, tokens, budget.clock() - begin, reopens=self._reopens)

    def _shown(self) -> Iterator[tuple[Row, list[Chain]]]:
        """All rows; a terminal shows the number of each, and the time that the others will take by their tokens."""
        rows = self._rows
        sizes = [tokens_of(chains) for _, chains in rows] if isinstance(rows, list) else []
        begin = time.monotonic()
        for number, (row, chains) in enumerate(rows):
            of, done = f" {number + 1} of {len(sizes)}" if sizes else "", sum(sizes[:number])
            left = (time.monotonic() - begin) / done * sum(sizes[number:]) if done else 0.0
            status(f"scenario{of}: {row.name}" + (f", about {left:.0f} s left" if left >= 1 else ""))
            yield row, chains
        status("")
