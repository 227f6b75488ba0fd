"""Checks lookup tables for irregular rows, which could treat one position or token differently."""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.audit.decisions.affine_forms import ValueKind

TOLERANCE = 1e-3
"""Tolerance relative to the largest number of a column; larger than the error of float32 cosines of large angles."""

TABLE_ROWS = 32
"""Constants with fewer rows are not checked: the scenarios read every row."""

LARGEST = 3e38
"""Numbers of this size hide a key."""


def odd_row(table: Array, step: float = 0.0) -> int | None:
    """The first irregular row; None if the table is regular.

    Regular columns are constants, lines and scaled sinusoids of the row number. A square table whose rows are the
    previous row shifted by one place is regular as well: a mask by distance. Rows with numbers that are not finite
    are regular only in constant tables and such masks.

    Args:
        table: rows along the first axis.
        step: unit in the last place to which its numbers were rounded, if that is larger than the tolerance.
    """
    rows = table.reshape(len(table), -1).astype(np.float64) if table.ndim > 1 else table.astype(np.float64)[:, None]
    if len(rows) < 4 or (rows == rows[0]).all():
        return None
    if rows.shape[0] == rows.shape[1]:
        shifted = (rows[1:, 1:] != rows[:-1, :-1]).any(axis=1)
        if shifted.mean() < 0.5:  # a mask by distance
            return int(np.argmax(shifted)) + 1 if shifted.any() else None
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        return int(np.argmin(finite))
    share = max(TOLERANCE, step)
    odd = (_odd_in(column, (np.abs(column).max() or 1.0) * share) for column in rows.T)
    return min((row for row in odd if row is not None), default=None)


def kind_of(table: Array) -> ValueKind:
    """Possible values of a regular table: a mask, a sinusoid, or a line (any number)."""
    rows = table.astype(np.float64)
    if ((rows == 0) | (rows == 1) | ~(np.abs(rows) < LARGEST)).all() and not np.isnan(rows).any():
        return ValueKind.BINARY
    return (
        ValueKind.PERIODIC
        if np.abs(rows).max(initial=0.0) <= 1 + TOLERANCE and rows.min(initial=0.0) < 0
        else ValueKind.UNKNOWN
    )


def _odd_in(column: Array, tolerance: float) -> int | None:
    """The first irregular row of a column: c[n + 1] + c[n - 1] = f * c[n], with one f for a sinusoid, 2 for a line."""
    around, middle = column[2:] + column[:-2], column[1:-1]
    if np.ptp(column) <= tolerance:
        return None
    candidates = [2.0, *_factors(around, middle)]
    misses = [np.abs(around - factor * middle) > 4 * tolerance for factor in candidates]
    best = min(misses, key=np.count_nonzero)
    return int(np.argmax(best)) + 2 if best.any() else None


def _factors(around: Array, middle: Array) -> list[float]:
    """The factor computed from the rows of the largest numbers; one of them may be irregular."""
    largest = np.argsort(-np.abs(middle))[:5]
    return [float(around[row] / middle[row]) for row in largest if middle[row]]
