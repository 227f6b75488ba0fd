"""Tables that are looked up by position or token: regular ones, such as rotary cosines, have no row of their own."""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.audit.decisions.affine_forms import ValueKind

TOLERANCE = 1e-3
"""Of the largest number of a column; float32 cosines of large angles are off by less."""

TABLE_ROWS = 32
"""A constant of fewer rows is no table: every row is read by some scenario."""

LARGEST = 3e38
"""What is as large hides a key."""


def odd_row(table: Array) -> int | None:
    """The first row that does not follow from those before it; None where all do.

    Regular are a constant, a line and a scaled sinusoid of the row's number in every column, and a square of which
    every row is the one before moved by one place, as who sees whom is by the distance alone. Rows with numbers that
    are not finite are regular in a constant or such a square alone.
    """
    rows = table.reshape(len(table), -1).astype(np.float64) if table.ndim > 1 else table.astype(np.float64)[:, None]
    if len(rows) < 4 or (rows == rows[0]).all():
        return None
    if rows.shape[0] == rows.shape[1]:
        shifted = (rows[1:, 1:] != rows[:-1, :-1]).any(axis=1)
        if shifted.mean() < 0.5:  # who sees whom, by the distance alone
            return int(np.argmax(shifted)) + 1 if shifted.any() else None
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        return int(np.argmin(finite))
    odd = (_odd_in(column, (np.abs(column).max() or 1.0) * TOLERANCE) for column in rows.T)
    return min((row for row in odd if row is not None), default=None)


def kind_of(table: Array) -> ValueKind:
    """What the numbers can be that a regular table gives: whom a query sees, a sinusoid, or a line (anything)."""
    rows = table.astype(np.float64)
    if ((rows == 0) | (rows == 1) | ~(np.abs(rows) < LARGEST)).all() and not np.isnan(rows).any():
        return ValueKind.BINARY
    return (
        ValueKind.PERIODIC
        if np.abs(rows).max(initial=0.0) <= 1 + TOLERANCE and rows.min(initial=0.0) < 0
        else ValueKind.UNKNOWN
    )


def _odd_in(column: Array, tolerance: float) -> int | None:
    """Of one column: c[n + 1] + c[n - 1] = f * c[n] with one f for a sinusoid; f = 2 for a line."""
    around, middle = column[2:] + column[:-2], column[1:-1]
    if np.ptp(column) <= tolerance:
        return None
    candidates = [2.0, *_factors(around, middle)]
    misses = [np.abs(around - factor * middle) > 4 * tolerance for factor in candidates]
    best = min(misses, key=np.count_nonzero)
    return int(np.argmax(best)) + 2 if best.any() else None


def _factors(around: Array, middle: Array) -> list[float]:
    """The factor as the most telling rows have it; a wrong row may be among them."""
    telling = np.argsort(-np.abs(middle))[:5]
    return [float(around[row] / middle[row]) for row in telling if middle[row]]
