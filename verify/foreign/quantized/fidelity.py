"""Whether quantised weights are the model's up to rounding: the error of every element, in steps of its own scale.

Rounding to the nearest code leaves at most half a step, and what GPTQ moves about stays near it. A wrong zero point is
off by whole steps, a wrong scale, packing or row by several; half of the elements of a stretch being further off than
that is no rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.foreign.quantized.matching import Found, Placement

NEAR, FAR = 0.75, 2.0
"""Steps that half the elements of a stretch must be within: where rounding is to the nearest, and elsewhere."""
NEAREST = 0.05
"""Rounding is to the nearest where no larger share of all elements is further off than `NEAR`."""
IMPLAUSIBLE = 0.5
"""Relative error beyond which a matrix is not the tensor that it is alike."""
STRETCH, LEAST = 64, 8
"""Elements of a stretch along a row or column, and of the last one at least."""
LINES = 512
"""Rows in memory at a time."""


@dataclass(frozen=True)
class Fidelity:
    """How far a quantised matrix is from the tensor that it is.

    Attributes:
        name: of the tensor.
        relative_error: RMS(quantised - original) / RMS(original).
        problem: what is no rounding, in words; empty where all is.
    """

    name: str
    relative_error: float
    problem: str = ""


@dataclass
class _Tally:
    """What is added up over the rows of one placement."""

    error: float = 0.0
    size: float = 0.0
    near: int = 0
    count: int = 0
    odd: dict[float, str] | None = None

    def see(self, steps: Array, first: int) -> None:
        """Errors in steps, of rows from `first` on."""
        far = np.abs(steps)
        self.near += int((far > NEAR).sum())
        self.count += far.size
        self.odd = self.odd or {}
        for limit in (NEAR, FAR):
            if limit not in self.odd and (said := _stretch(far > limit, steps, first)):
                self.odd[limit] = said


def fidelities(found: Found, reference: Mapping[str, LazyTensor]) -> list[Fidelity]:
    """One for every tensor in a matrix."""
    return [_fidelity(found, placement, reference[placement.name]) for placement in found.placements]


def _fidelity(found: Found, placement: Placement, tensor: LazyTensor) -> Fidelity:
    tally = _Tally()
    columns = slice(placement.columns.start, placement.columns.stop)
    for start, original in _originals(placement, tensor):
        stop = start + len(original)
        error = found.stored.rows(start, stop)[:, columns] - original
        tally.error += float((error.astype(np.float64) ** 2).sum())
        tally.size += float((original.astype(np.float64) ** 2).sum())
        tally.see(error / found.stored.steps(start, stop)[:, columns], start)
    relative = (tally.error / tally.size) ** 0.5 if tally.size else float("inf") if tally.error else 0.0
    return Fidelity(placement.name, relative, _problem(tally, relative))


def _problem(tally: _Tally, relative: float) -> str:
    share, odd = tally.near / max(1, tally.count), tally.odd or {}
    if share > 0.5:
        return odd.get(NEAR, "") or f"{share:.0%} of its elements are not within rounding of the model's"
    if not relative <= IMPLAUSIBLE:
        return f"its relative error is {relative:.2f}"
    return odd.get(NEAR if share <= NEAREST else FAR, "")


def _originals(placement: Placement, tensor: LazyTensor) -> Iterator[tuple[int, Array]]:
    """The model's values in the orientation of the matrix: the row of it that they begin at, and some rows."""
    whole = tensor.read().T if placement.turned else None
    across = slice(placement.first_column, placement.first_column + len(placement.columns))
    for start in range(0, len(placement.rows), LINES):
        first = placement.first_row + start
        last = placement.first_row + min(start + LINES, len(placement.rows))
        rows = whole[first:last] if whole is not None else tensor.rows(first, last)
        yield placement.rows.start + start, rows[:, across].astype(np.float32)


def _stretch(far: Array, steps: Array, first: int) -> str:
    """The first stretch of a row or a column of which most elements are off; empty where there is none."""
    for along in (1, 0):
        length = far.shape[along]
        edges = np.arange(0, length, STRETCH)
        sizes = np.diff([*edges, length])
        most = np.add.reduceat(far.astype(np.int32), edges, axis=along) * 2 > (sizes if along else sizes[:, None])
        most &= (sizes if along else sizes[:, None]) >= min(LEAST, length)
        if most.any():
            line, at = (int(x) for x in np.argwhere(most if along else most.T)[0])
            part = slice(int(edges[at]), int(edges[at]) + int(sizes[at]))
            lines = int((most if along else most.T).any(axis=1).sum())
            off = steps[line, part] if along else steps[part, line]
            return _said("row" if along else "column", line + (first if along else 0), lines, off)
    return ""


def _said(what: str, line: int, lines: int, off: Array) -> str:
    shift = round(float(np.median(off)))
    zero = f", as if its zero point were {-shift:+d}" if shift and np.mean(np.abs(off - shift) <= NEAR) > 0.9 else ""
    more = f" and {lines - 1} more" if lines > 1 else ""
    return f"{what} {line}{more} is off by {float(np.median(np.abs(off))):.1f} steps of its scale, no rounding{zero}"
