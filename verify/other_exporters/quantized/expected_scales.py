"""What scales and zero points must be in a folder that llmconv wrote: the nearest code is judged given these.

A coarse scale, of which every code is the zero point, would erase a block although each code is the nearest one. So
plain rounding and a search in which all columns count alike are computed again, and demanded exactly; another search
is demanded within what its grid can produce (docs/quantization.md, `--method`):

* symmetric: `scale = extreme / -2 ** (bits - 1)`, zero point `2 ** (bits - 1)`, with the value of largest magnitude;
* else `scale = range / (2 ** bits - 1)`, zero point `-low / scale`, with 0 in the range;
* one scale per column: `extreme / 127`, or 1 for a column of zeros.

A search tries ranges of 14 to 15.75 steps (6.4 to 8.4 on one side if symmetric), then some half as far apart around
the best with zero points up to one off, and fits the scale by least squares, `sum(f * c * w) / sum(f * c * c)`: a mean
of the quotients w / c, whatever the factors f are. A weight with the code c is between `abs(c) - 1/2` and
`abs(c) + 1/2` tried steps, and further out only where codes end: 2.6 steps. This bounds the quotients.

Codes of rounding with error feedback (GPTQ) are not the nearest. Columns make up for the errors of others, so that the
errors of a block nearly cancel each other; a zero point that is off moves all of them. Single codes, and zero points
that are one off, look like codes of this method, but for the first column, which has no error to make up for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import ml_dtypes
import numpy as np

from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.quantized_matrix import TINY, QuantizedMatrix
from llmconv.verify.other_exporters.quantized.tensor_matching import TensorMatch

TINY_SCALE = np.float32(TINY)  # A block with a smaller range is stored as zeros
FOUR_BITS = 15  # the largest code of 4 bits
HALF = np.float32(0.49999997)  # added and truncated, ties go away from zero
POINT = 0.5 + 1e-3  # maximum distance of a zero point of plain rounding from its quotient
RANGES = 0.5 / 15.925, 3.6 / 13.825  # least and largest scale of a search, as a share of the range of a block
EXTREMES = 0.5 / 8.6, 1.5 / 6.2  # the same if it is symmetric, as a share of the extreme value
POINTS = 14.0, 15.75, 1.501
"""Zero points of a search: `-low / range` times the first to the second, and so far from there."""

TURNS = 6  # ranges that a search tries first
FIRST, STEP = {False: np.float32(14), True: np.float32(-6.4)}, {False: np.float32(0.35), True: np.float32(-0.4)}
"""Steps of the first range, and from each to the next; of one with zero points, and of a symmetric one."""
AT_ONCE = 1 << 13  # blocks that are searched at once, which fit into a core's cache
ERASED = 0.75
"""Maximum root mean square error of a block as a share of its weights; at most 0.55 in draws without heavy tails."""
MOVED = 4  # steps by which error feedback moves weights before their scale is chosen


def plain(blocks: Blocks) -> Array:
    """Where scales and zero points are those of plain rounding, [rows, blocks]; of 8 bits it is always symmetric."""
    scale = np.where(np.abs(blocks.extreme) < TINY_SCALE, 0.0, blocks.extreme / -blocks.middle)
    symmetric: Array = blocks.is_middle & blocks.near(scale)
    if blocks.largest > FOUR_BITS or blocks.symmetric:
        return symmetric
    empty = blocks.high - blocks.low < TINY_SCALE
    scale = np.where(empty, 0.0, blocks.extent / blocks.largest)
    point = np.where(empty, blocks.middle, -blocks.low / blocks.extent * blocks.largest)
    ranged: Array = blocks.near(scale) & (np.abs(blocks.zeros - point) <= POINT)
    return ranged


def searched(blocks: Blocks) -> Array:
    """Where scales and zero points can be those of a search, whatever the importance of columns, [rows, blocks]."""
    empty = np.abs(blocks.extreme) < TINY_SCALE
    share = np.divide(-blocks.scales, blocks.extreme, out=np.zeros_like(blocks.scales), where=~empty)
    fits = _between(blocks, share, EXTREMES, blocks.extreme)
    symmetric = blocks.is_middle & np.where(empty, blocks.near(np.zeros(1)), fits)
    empty = blocks.high - blocks.low < TINY_SCALE
    point, (first, last, around) = -blocks.low / blocks.extent, POINTS
    fits = (blocks.zeros >= point * first - around) & (blocks.zeros <= point * last + around)
    fits &= _between(blocks, blocks.scales / blocks.extent, RANGES, blocks.extent)
    ranged: Array = np.where(empty, blocks.near(np.zeros(1)) & blocks.is_middle, fits)
    return symmetric | ranged


def _between(blocks: Blocks, share: Array, limits: tuple[float, float], size: Array) -> Array:
    rounding = blocks.smallest / np.maximum(np.abs(size), float(TINY_SCALE))
    least, most = (limit * (1 + sign * blocks.relative) for limit, sign in zip(limits, (-1, 1), strict=True))
    return (share >= least - rounding) & (share <= most + rounding)


def as_searched(blocks: Blocks, importance: Array | None = None) -> Array:
    """Where scales and zero points are those of the search, [rows, blocks].

    `importance` [columns] is that of columns, None if all count alike. All arithmetic of a search is float32 in the
    order of the columns, so it has the same bits everywhere.
    """
    shape = blocks.scales.shape
    weights = blocks.weights.reshape(-1, blocks.weights.shape[2])
    factors = None
    if importance is not None:
        factors = np.tile(in_blocks(importance[None], blocks.weights.shape[2])[0], (shape[0], 1))
    parts = [
        _least_error(weights[at : at + AT_ONCE], blocks, None if factors is None else factors[at : at + AT_ONCE])
        for at in range(0, len(weights), AT_ONCE)
    ]
    scales, zeros = (np.concatenate(part).reshape(shape) for part in zip(*parts, strict=True))
    with np.errstate(over="ignore"):
        stored = scales.astype(blocks.dtype).astype(np.float64)
    found: Array = blocks.near(stored) & (blocks.zeros == zeros)
    return found


def _least_error(weights: Array, blocks: Blocks, factors: Array | None) -> tuple[Array, Array]:
    """Scales and zero points of weights float32 [blocks, size], by the search; `factors` are of the same shape."""
    largest, symmetric = np.float32(blocks.largest), blocks.symmetric
    middle = np.full(len(weights), np.float32(blocks.middle))
    low, high = np.minimum(weights.min(axis=1), 0), np.maximum(weights.max(axis=1), 0)
    size = np.where(high > -low, high, low) if symmetric else high - low
    columns, step = np.ascontiguousarray(weights.T), STEP[symmetric]
    counts = None if factors is None else np.ascontiguousarray(factors.T)
    best = _Best(np.zeros_like(low))

    def attempt(width: Array, zero: Array) -> None:
        inverse = width / size
        products, squares = np.zeros_like(low), np.zeros_like(low)
        for at, column in enumerate(columns):
            code = _rounded(column * inverse + zero, blocks.largest)
            code -= zero
            scaled = code if counts is None else counts[at] * code
            products += scaled * column
            squares += scaled * code
        scale = products / squares
        gain = scale * products
        best.keep((squares > 0) & (gain > best.gain) & (gain < np.inf), gain, scale, zero, width)

    with np.errstate(all="ignore"):
        width = np.full_like(low, -middle[0] if symmetric else largest)
        zero = middle if symmetric else _rounded(-low / (size / width), blocks.largest)
        best.keep(np.ones(len(low), bool), best.gain, size / width, zero, width)
        for turn in range(TURNS):
            width = np.full_like(low, FIRST[symmetric] + step * np.float32(turn))
            attempt(width, middle if symmetric else _rounded(-low * (width / size), blocks.largest))
        width, zero = best.width, best.zero
        for turn, shift in ((turn, shift) for turn in (-1, 0, 1) for shift in ((0,) if symmetric else (-1, 0, 1))):
            if turn or shift:
                other = np.clip(zero + np.float32(shift), np.float32(0), largest)
                attempt(width + step * np.float32(0.5) * np.float32(turn), other)
    empty = np.abs(size) < TINY_SCALE
    return np.where(empty, np.float32(0), best.scale), np.where(empty, middle, best.zero)


class _Best:
    """What a search has kept of each block; the gain is 0 at first."""

    def __init__(self, gain: Array) -> None:
        self.gain = self.scale = self.zero = self.width = gain

    def keep(self, better: Array, gain: Array, scale: Array, zero: Array, width: Array) -> None:
        """Takes the values of the blocks that are better."""
        self.gain, self.scale = np.where(better, gain, self.gain), np.where(better, scale, self.scale)
        self.zero, self.width = np.where(better, zero, self.zero), np.where(better, width, self.width)


def not_erased(blocks: Blocks) -> Array:
    """Where the error is less than `ERASED` of the weights, [rows, blocks]; with any importance of columns it is."""
    weights = blocks.weights.astype(np.float64)
    size, error = np.sqrt((weights**2).sum(axis=2)), np.sqrt(((blocks.values - weights) ** 2).sum(axis=2))
    kept: Array = (error <= ERASED * size + _rounding(blocks, size)) | (blocks.extent <= 2 * TINY_SCALE)
    return kept


def _rounding(blocks: Blocks, size: Array) -> Array:
    added: Array = blocks.relative * size + blocks.smallest * blocks.largest * blocks.weights.shape[2] ** 0.5
    return added


def _rounded(values: Array, largest: int) -> Array:
    """Codes of float32 `values`, which it replaces."""
    np.minimum(np.maximum(values, np.float32(0), out=values), np.float32(largest), out=values)
    values += HALF
    return np.trunc(values, out=values)


def scale_problem(
    blocks: Blocks, first: int, is_plain: bool, *, weighted: bool, importance: Array | None = None, every: int = 1
) -> str:
    """Describes the first block whose scale or zero point an export would not choose; empty if there is none.

    If `is_plain`, scales come from extreme values alone; if `weighted`, they suit the columns that matter on a text, as
    the `importance` [columns] says if it is known. A search is repeated for one row in `every`.
    """
    if is_plain or blocks.largest > FOUR_BITS:
        return _description(blocks, plain(blocks), first, "not that of its weights")
    if problem := _description(blocks, searched(blocks), first, "beyond what a search tries"):
        return problem
    if weighted and importance is None:
        return _description(blocks, not_erased(blocks), first, "not that of the least error")
    some = blocks if every == 1 else blocks.some(every)
    fits = as_searched(some, importance)
    return _description(some, fits, first, "not the one that the search of an export finds", every)


def feedback_problem(blocks: Blocks, first: int) -> str:
    """As `scale_problem`, for error feedback (GPTQ), whose scales suit weights that errors before them moved.

    They move by up to `MOVED` of the coarsest steps of their row; those of the first block do not. `blocks` are of
    whole rows; `first` is the number of the first.
    """
    extent = blocks.extent + 2 * MOVED * blocks.extent.max(axis=1, keepdims=True, initial=0) / blocks.largest
    fits = np.abs(blocks.scales) <= RANGES[1] * extent * (1 + blocks.relative) + blocks.smallest
    fits[:, :1] &= searched(blocks)[:, :1]
    return _description(blocks, fits, first, "beyond what a search tries")


def _description(blocks: Blocks, fits: Array, first: int, what: str, every: int = 1) -> str:
    if (odd := first_of(~fits)) is None:
        return ""
    row, block, more = odd
    found = f"{blocks.scales[row, block]:.3g}, zero point {blocks.zeros[row, block]:.0f}"
    return f"the scale of row {first + row * every}, block {block}{more} is {what} ({found})"


STEPS = 127
SMALLEST = float(np.finfo(np.float32).tiny)  # A column with a smaller scale is stored as zeros, with the scale 1


class ColumnScales:
    """The scales float32 of a matrix with one for each column."""

    def __init__(self, scales: Array) -> None:
        self._scales, self._extremes = scales.astype(np.float64), np.zeros(len(scales))

    @classmethod
    def of(cls, stored: QuantizedMatrix, match: TensorMatch) -> ColumnScales | None:
        """The scales of columns that a tensor fills; None if the matrix has other scales."""
        rows = stored.shape[0]
        if stored.repeat != (rows, 1) or len(match.rows) != rows or stored.scale.size != stored.shape[1]:
            return None
        return cls(stored.scale.reshape(-1)[match.columns.start : match.columns.stop])

    def add(self, original: Array) -> None:
        """Receives rows of the model's weights, of these columns."""
        self._extremes = np.maximum(self._extremes, np.abs(original).max(axis=0, initial=0))

    def problem(self) -> str:
        """Describes the first scale that is another one; empty if there is none."""
        wanted = self._extremes / STEPS
        wanted = np.where(wanted > SMALLEST, wanted, 1.0)
        if (odd := first_of(~(np.abs(self._scales - wanted) <= EXACT * wanted))) is None:
            return ""
        _, at, more = odd
        return f"the scale of column {at}{more} is {self._scales[at]:.3g}; that of its weights is {wanted[at]:.3g}"


MEAN = 1.5
"""Maximum absolute mean error of a block in steps; of 3.3 million blocks of a 135 M model the largest had 0.98."""

LEAST = 0.005
"""Minimum share of a matrix's codes that are not the nearest, if any; of tiny random models it is 0.03 to 0.15."""


@dataclass
class FeedbackShare:
    """The number of codes of a matrix that are not the nearest to their weights (`others`), and of all codes."""

    others: int = 0
    count: int = 0

    def add(self, others: Array) -> None:
        """Counts codes of some rows; `others` is true where they are not the nearest."""
        self.others += int(others.sum())
        self.count += others.size

    def problem(self) -> str:
        """Describes a matrix with too few of them; one with none was rounded without feedback, for want of tokens."""
        if not 0 < self.others < LEAST * self.count:
            return ""
        return f"{self.others:,} of {self.count:,} codes are not the nearest, fewer than error feedback causes"


def beyond_feedback(steps: Array, size: int, first: int) -> str:
    """Describes the first block whose mean error in `steps` [rows, columns] is above `MEAN`; empty if there is none."""
    edges = np.arange(0, steps.shape[1], size)
    counts = np.diff([*edges, steps.shape[1]])
    means = np.add.reduceat(steps, edges, axis=1) / counts
    if (odd := first_of(np.abs(means) > MEAN)) is None:
        return ""
    row, block, _ = odd
    shift = float(means[row, block])
    return f"row {first + row}, block {block} is off by {shift:+.1f} steps on average: its zero point may be wrong"


EXACT = 1e-5  # maximum relative difference of quotients and sums in float32


@dataclass(frozen=True)
class Blocks:
    """Some rows of a matrix in blocks."""

    weights: Array  # float32 [rows, blocks, size], padded with zeros
    scales: Array  # float64 [rows, blocks], as stored
    zeros: Array  # float64 [rows, blocks]
    read: Callable[[], Array]  # what the codes stand for, [rows, columns]
    largest: int  # the largest code
    dtype: np.dtype  # of the stored scales
    symmetric: bool  # no zero points are stored

    @classmethod
    def of(cls, stored: QuantizedMatrix, original: Array, columns: slice, start: int) -> Blocks | None:
        """The blocks of rows from `start` on; None if columns cut a block, or are no blocks.

        `original` is float32 [rows, columns] of the model, for these `columns` of the matrix.
        """
        size, stop = stored.repeat[1], start + len(original)
        cut = columns.start % size or (columns.stop % size and columns.stop != stored.shape[1])
        if stored.repeat[0] != 1 or stored.largest is None or stored.columns is not None or cut:
            return None
        part = slice(columns.start // size, -(-columns.stop // size))
        scales, zeros = (grid[start:stop, part].astype(np.float64) for grid in (stored.scale, stored.zero))

        def values() -> Array:
            return stored.rows(start, stop)[:, columns]

        weights, kind = in_blocks(original, size), stored.scale.dtype
        return cls(weights, scales, zeros, values, stored.largest, kind, stored.symmetric)

    def some(self, every: int) -> Blocks:
        """Those of one row in `every`."""
        weights, scales, zeros = (part[::every] for part in (self.weights, self.scales, self.zeros))
        return replace(self, weights=weights, scales=scales, zeros=zeros, read=lambda: self.read()[::every])

    @cached_property
    def values(self) -> Array:
        """What the codes stand for, float64 [rows, blocks, size]."""
        return in_blocks(self.read().astype(np.float64), self.weights.shape[2])

    @property
    def middle(self) -> int:
        return (self.largest + 1) // 2

    @cached_property
    def low(self) -> Array:
        low: Array = np.minimum(self.weights.min(axis=2), np.float32(0))
        return low

    @cached_property
    def high(self) -> Array:
        high: Array = np.maximum(self.weights.max(axis=2), np.float32(0))
        return high

    @property
    def extent(self) -> Array:
        """Largest minus least value, float64, at least `TINY`."""
        return np.maximum(self.high.astype(np.float64) - self.low, TINY)

    @cached_property
    def extreme(self) -> Array:
        return np.where(self.high > -self.low, self.high, self.low).astype(np.float64)

    @property
    def is_middle(self) -> Array:
        """Where the zero point is that of symmetric blocks."""
        found: Array = self.zeros == self.middle
        return found

    def near(self, wanted: Array) -> Array:
        """Where scales are `wanted` up to their rounding."""
        found: Array = np.abs(self.scales - wanted) <= self.relative * np.abs(wanted) + self.smallest
        return found

    @property
    def relative(self) -> float:
        return float(ml_dtypes.finfo(self.dtype).eps) / 2 + EXACT

    @property
    def smallest(self) -> float:
        return float(ml_dtypes.finfo(self.dtype).smallest_subnormal) / 2


def first_of(odd: Array) -> tuple[int, int, str] | None:
    """The row and the column of the first true element, and how many more there are in words; None for none."""
    places = np.argwhere(odd.reshape(-1, odd.shape[-1]))
    more = f" and {len(places) - 1:,} more" if len(places) > 1 else ""
    return (int(places[0][0]), int(places[0][1]), more) if len(places) else None


def in_blocks(rows: Array, size: int) -> Array:
    """Rows as `[N, blocks, size]`, padded with zeros."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % size)))
    return padded.reshape(len(rows), -1, size)
