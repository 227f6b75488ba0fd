"""Whether quantised weights are the model's up to rounding: the error of every element, in steps of its own scale.

Rounding to the nearest code leaves at most half a step, and what GPTQ moves about stays near it. A wrong zero point is
off by whole steps, a wrong packing or row by several. A wrong scale leaves errors that grow with the code, which those
of rounding never do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.other_exporters.quantized.tensor_matching import Found, Placement

NEAR, NEAR_SHARE = 0.6, 1 / 8
"""Where rounding is to the nearest, no stretch has more than that share further off than those steps: clipped ones."""
FAR, FAR_SHARE = 2.0, 1 / 2
"""The same elsewhere."""
NEAREST = 0.02
"""Rounding is to the nearest where no larger share of all elements is further off than `NEAR`."""
SHIFTED, SHIFTED_SHARE = 0.75, 0.6
"""More than that share of all elements further off than those steps is no rounding of any kind."""
GROWING = 12.0
"""Median over stretches of t squared, of errors regressed on codes: 0.5 where neither depends on the other."""
IMPLAUSIBLE = 0.5
"""Relative error beyond which a matrix is not the tensor that it is alike."""
STRETCH, LEAST = 64, 16
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
    """What is added up over the rows of one placement.

    Attributes:
        error, size: sums of squares, of errors and of the original.
        beyond: elements further off than `NEAR` and than `SHIFTED`; of `count`.
        odd: the first stretch that is odd by the rule of either kind of rounding, in words.
        growth: t squared of stretches, along rows and along columns.
    """

    error: float = 0.0
    size: float = 0.0
    count: int = 0
    beyond: Array = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    odd: dict[float, str] = field(default_factory=dict)
    growth: dict[int, list[Array]] = field(default_factory=lambda: {1: [], 0: []})

    def see(self, steps: Array, codes: Array, first: int) -> None:
        """Errors in steps, and codes without their zero point, of rows from `first` on."""
        far = np.abs(steps)
        self.beyond += [(far > NEAR).sum(), (far > SHIFTED).sum()]
        self.count += far.size
        for limit, share in ((NEAR, NEAR_SHARE), (FAR, FAR_SHARE)):
            if limit not in self.odd and (said := _stretch(far > limit, share, steps, first)):
                self.odd[limit] = said
        for along, kept in self.growth.items():
            kept.append(_growth(steps, codes, along))

    @property
    def grows(self) -> bool:
        """Whether errors grow with codes."""
        medians = [np.median(np.concatenate(kept)) for kept in self.growth.values() if kept and kept[0].size]
        return max(medians, default=0.0) > GROWING


def fidelities(found: Found, reference: Mapping[str, LazyTensor]) -> list[Fidelity]:
    """One for every tensor in a matrix."""
    return [_fidelity(found, placement, reference[placement.name]) for placement in found.placements]


def _fidelity(found: Found, placement: Placement, tensor: LazyTensor) -> Fidelity:
    tally = _Tally()
    columns = slice(placement.columns.start, placement.columns.stop)
    for start, original in _originals(placement, tensor):
        stop = start + len(original)
        values, steps = (part(start, stop)[:, columns] for part in (found.stored.rows, found.stored.steps))
        error = values - original
        tally.error += float((error.astype(np.float64) ** 2).sum())
        tally.size += float((original.astype(np.float64) ** 2).sum())
        tally.see(error / steps, values / steps, start)
    relative = (tally.error / tally.size) ** 0.5 if tally.size else float("inf") if tally.error else 0.0
    return Fidelity(placement.name, relative, _problem(tally, relative))


def _problem(tally: _Tally, relative: float) -> str:
    near, shifted = tally.beyond / max(1, tally.count)
    if shifted > SHIFTED_SHARE:
        return tally.odd.get(NEAR) or f"{shifted:.0%} of its elements are off by more than rounding"
    if not relative <= IMPLAUSIBLE:
        return f"its relative error is {relative:.2f}"
    if near <= NEAREST and tally.odd.get(NEAR):
        return tally.odd[NEAR]
    if tally.grows:
        return "its errors grow with its codes, so its scales are others"
    return tally.odd.get(FAR, "")


def _originals(placement: Placement, tensor: LazyTensor) -> Iterator[tuple[int, Array]]:
    """The model's values in the orientation of the matrix: the row of it that they begin at, and some rows."""
    whole = tensor.read().T if placement.turned else None
    across = slice(placement.first_column, placement.first_column + len(placement.columns))
    for start in range(0, len(placement.rows), LINES):
        first = placement.first_row + start
        last = placement.first_row + min(start + LINES, len(placement.rows))
        rows = whole[first:last] if whole is not None else tensor.rows(first, last)
        yield placement.rows.start + start, rows[:, across].astype(np.float32)


def _sums(values: Array, along: int) -> tuple[Array, Array, Array]:
    """Sums over stretches, `[lines, stretches]`; where they begin, and how long they are; without short ones."""
    edges = np.arange(0, values.shape[along], STRETCH)
    sizes = np.diff([*edges, values.shape[along]])
    sums = np.add.reduceat(values, edges, axis=along)
    kept = sizes >= min(LEAST, values.shape[along])
    return (sums if along else sums.T)[:, kept], edges[kept], sizes[kept]


def _growth(steps: Array, codes: Array, along: int) -> Array:
    """t squared of the slope of errors over codes, of every stretch."""
    (products, _, sizes), (squares, _, _), (errors, _, _) = (
        _sums(values, along) for values in (steps * codes, codes**2, steps**2)
    )
    explained = products**2 / np.maximum(squares, 1e-9)
    found: Array = explained * sizes / np.maximum(errors - explained, 1e-3 * sizes)
    return found.ravel()


def _stretch(far: Array, share: float, steps: Array, first: int) -> str:
    """The first stretch of a row or a column of which too many elements are off; empty where there is none."""
    for along in (1, 0):
        counts, edges, sizes = _sums(far.astype(np.int32), along)
        odd = counts > share * sizes
        if odd.any():
            line, at = (int(x) for x in np.argwhere(odd)[0])
            part = slice(int(edges[at]), int(edges[at]) + int(sizes[at]))
            off = steps[line, part] if along else steps[part, line]
            lines = int(odd.any(axis=1).sum())
            return _said("row" if along else "column", line + (first if along else 0), lines, off)
    return ""


def _said(what: str, line: int, lines: int, off: Array) -> str:
    shift = round(float(np.median(off)))
    zero = (
        f", as if its zero point were off by {-shift:+d}"
        if shift and np.mean(np.abs(off - shift) <= NEAR) > 0.9
        else ""
    )
    more = f" and {lines - 1} more" if lines > 1 else ""
    return f"{what} {line}{more} is off by up to {float(np.abs(off).max()):.1f} steps of its scale, no rounding{zero}"
