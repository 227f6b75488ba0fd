"""Rows of a parametrized test: few of them are quick, and of the slow ones those run that show every value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def slow_but(rows: Iterable[Any], *quick: Any) -> list[Any]:
    """The rows, slow but for some.

    Args:
        rows: names or other values.
        quick: those that the quick tests run.
    """
    return [row if row in quick else pytest.param(row, marks=pytest.mark.slow) for row in rows]


def each_value(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Positions of rows that together have every value of every parameter, each at least once.

    A grid of families and faults has as many branches as it has families and faults, not as it has pairs; a list
    without repeated values is kept whole. Values are equal if they look equal. Ties go to the values that were chosen
    least, so that the faults are spread over the families.

    Args:
        rows: the value of each parameter, in each row.
    """
    cells = [{(name, repr(value)) for name, value in row.items()} for row in rows]
    left = set().union(*cells)
    chosen: list[int] = []
    used: Counter[tuple[str, str]] = Counter()
    while left:
        best = max(
            range(len(cells)), key=lambda at: (len(cells[at] & left), -sum(used[cell] for cell in cells[at]), -at)
        )
        chosen.append(best)
        used.update(cells[best])
        left -= cells[best]
    return sorted(chosen)
