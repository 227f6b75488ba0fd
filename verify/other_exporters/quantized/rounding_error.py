"""Whether quantized weights equal the model's up to rounding, by the error of every element in steps of its scale.

Rounding to the nearest code has an error of at most half a step, and errors of GPTQ are close to it. A wrong zero
point causes errors of whole steps, a wrong packing or row of several steps. A wrong scale causes errors that grow with
the code, unlike rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from llmconv.tensors import Array, DType, LazyTensor
from llmconv.verify.other_exporters.quantized.dequantized_reference import stack_of
from llmconv.verify.other_exporters.quantized.expected_scales import (
    Blocks,
    ColumnScales,
    FeedbackShare,
    beyond_feedback,
    feedback_problem,
    first_of,
    in_blocks,
    scale_problem,
)
from llmconv.verify.other_exporters.quantized.quantized_matrix import TINY, QuantizedMatrix
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix, TensorMatch

EXACT = 1e-6  # maximum relative difference of values that are the same product in float32, in another order


@dataclass(frozen=True)
class ExpectedCodes:
    """What the codes of quantized weights must be."""

    # every code is the nearest one, given its scale and zero point, and these are what an export chooses
    nearest: bool = False
    plain: bool = False  # scales of 4 bits come from extreme values alone, as those of 8 bits always do
    # scales of 4 bits suit the columns that matter on a text; values of others may be far beyond the codes
    weighted: bool = False
    feedback: bool = False  # codes of 4 bits are those of GPTQ, which are the nearest to other values
    every: int = 1  # a search is repeated for one row in so many; all scales must be within what it tries
    # weights whose values are those of the reference, with the dtype of its scales; by name
    kept: Mapping[str, DType] = field(default_factory=dict)
    # of columns, float32 [K], with which scales of 4 bits were searched, by name: in all others columns count alike.
    # None if it is not known with which
    importance: Mapping[str, LazyTensor] | None = None

    def has_feedback(self, name: str) -> bool:
        """Whether 4 bits of a tensor are those of GPTQ, which has no importance."""
        return self.feedback and not (self.importance and name in self.importance)

    def is_searched_on(self, name: str, columns: range) -> tuple[bool, Array | None]:
        """Whether it is known how scales of 4 bits were searched, and the importance [K]; None if all count alike."""
        if not self.weighted or self.importance is None:
            return not self.weighted, None
        found = self.importance.get(name)
        fits = found is None or found.shape == (len(columns),)
        return fits, found.read() if found is not None and fits else None

    def scales_of(self, name: str) -> DType | None:
        """The dtype of the reference's scales for a tensor whose codes are kept; else None."""
        return self.kept.get(stack_of(name))


ANY_ROUNDING = ExpectedCodes()


def other_values(
    values: Array, original: Array, codes: Array, scales: np.dtype, stored: DType, first: int, summands: Array
) -> str:
    """Describes the first of the graph's `values` that is not the `original` one, up to the rounding of its scale.

    Both are float32 [rows, columns]; `codes` are the graph's, minus their zero point. The graph's `scales` are rounded
    where their dtype is not that of the reference's, `stored`. `summands` are as large as code times scale and offset,
    of which a value may be a small difference.
    """
    limits = None if scales in (np.dtype(np.float32), stored.numpy) else ml_dtypes.finfo(scales)
    relative = EXACT if limits is None else float(limits.eps) / 2 + EXACT
    smallest = 0.0 if limits is None else float(limits.smallest_subnormal) / 2
    same = np.abs(values - original) <= relative * (np.abs(original) + summands) + smallest * np.abs(codes)
    if (odd := first_of(~same)) is None:
        return ""
    row, column, more = odd
    found, wanted = float(values[row, column]), float(original[row, column])
    place = f"row {first + row}, column {column}{more}"
    return f"the value at {place} is {found:.6g}; in the quantized model it is {wanted:.6g}"


NEAR, NEAR_SHARE = 0.6, 1 / 8
"""With rounding to the nearest code, the maximum share of elements of a stretch with an error above this many steps."""
FAR, FAR_SHARE = 2.0, 1 / 2  # the same for other rounding
NEAREST = 0.02
"""Maximum share of all elements with an error above `NEAR` with which rounding counts as to the nearest code."""
SHIFTED, SHIFTED_SHARE = 0.75, 0.6  # A larger share of all elements with an error above this many steps is not rounding
GROWING = 12.0  # maximum median t squared of errors regressed on codes per stretch: 0.5 if they are independent
IMPLAUSIBLE = 0.5  # maximum relative error of a matrix to its tensor
FEEDBACK_LINES = 0.5
"""With error feedback, single stretches of a real model are off by several steps; in a wrong row most of them are."""
FOUR_BITS = 15  # the largest code of 4 bits
HALF_STEP = 0.5 + 1e-3  # maximum distance from the nearest code in steps, which are rounded to float32
STRETCH, LEAST = 64, 16  # elements of a stretch along a row or column, and minimum for the last one
MAX_ROWS = 512  # rows in memory at a time
AT_ONCE = 1 << 19  # elements of codes that are compared at a time, which fit into a processor's cache


@dataclass(frozen=True)
class RoundingError:
    """RMS(quantized - original) / RMS(original), and a description of errors that are not rounding, else empty."""

    name: str
    relative_error: float
    problem: str = ""


@dataclass
class _Tally:
    """Sums over the rows of one match."""

    # error, size: sums of squares of errors and of original values
    error: float = 0.0
    size: float = 0.0
    count: int = 0  # number of elements
    # number of elements with an error above `NEAR` and above `SHIFTED`
    beyond: Array = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    # description of the first stretch that exceeds the limit of `NEAR` or `FAR`
    odd: dict[float, str] = field(default_factory=dict)
    other: str = ""  # description of the first element with another code or scale than expected
    # t squared of stretches, along rows and along columns
    growth: dict[int, list[Array]] = field(default_factory=lambda: {1: [], 0: []})
    lines: float = 0.0  # as in `_stretch`

    def add(self, steps: Array, codes: Array, first: int) -> None:
        """Adds the errors in steps, and the codes minus their zero point, of rows from `first` on."""
        far = np.abs(steps)
        self.beyond += [(far > NEAR).sum(), (far > SHIFTED).sum()]
        self.count += far.size
        for limit, share in ((NEAR, NEAR_SHARE), (FAR, FAR_SHARE)):
            if limit not in self.odd and (problem := _stretch(far > limit, share, steps, first, self.lines)):
                self.odd[limit] = problem
        for along, kept in self.growth.items():
            kept.append(_growth(steps, codes, along))

    @property
    def grows(self) -> bool:
        """Whether errors grow with codes."""
        medians = [np.median(np.concatenate(kept)) for kept in self.growth.values() if kept and kept[0].size]
        return max(medians, default=0.0) > GROWING


@np.errstate(over="ignore", invalid="ignore")  # errors of scales that are too large, or no numbers
def rounding_errors(
    found: MatchedMatrix, reference: Mapping[str, LazyTensor], expected: ExpectedCodes = ANY_ROUNDING
) -> list[RoundingError]:
    errors = []
    for match in found.matches:
        exact = _exact_error(found.stored, match, reference[match.name], expected)
        given = found, match, reference[match.name], expected
        errors.append(_rounding_error(*given) if exact is None else RoundingError(match.name, exact))
    return errors


def _exact_error(
    stored: QuantizedMatrix, match: TensorMatch, tensor: LazyTensor, expected: ExpectedCodes
) -> float | None:
    """The relative error of codes of which each is the nearest one, of scales that are computed again.

    None where they are not, or not demanded: then all errors are looked at, to say what is wrong.
    """
    scales, (size, columns) = ColumnScales.of(stored, match), (stored.repeat[1], match.columns)
    whole = stored.repeat[0] == 1 and stored.columns is None and len(columns) == stored.shape[1]
    known, importance = _search(stored, match, expected)
    loose = expected.has_feedback(match.name) or not known or expected.scales_of(match.name)
    if not expected.nearest or loose or stored.largest is None or not (scales or whole):
        return None
    errors = sizes = 0.0
    for start, original in original_rows(match, tensor, max(1, min(MAX_ROWS, AT_ONCE // max(1, len(columns))))):
        codes = stored.codes(start, start + len(original))[:, columns.start : columns.stop].astype(np.float32)
        if scales:
            scales.add(original)
            grids = [grid.astype(np.float32)[:, columns.start : columns.stop] for grid in (stored.scale, stored.zero)]
            weights = original
        else:
            blocks = Blocks.of(stored, original, slice(columns.start, columns.stop), start)
            if blocks is None:
                return None
            plain, every = expected.plain, expected.every
            if scale_problem(blocks, start, plain, weighted=False, importance=importance, every=every):
                return None
            grids = [grid.astype(np.float32)[..., None] for grid in (blocks.scales, blocks.zeros)]
            weights, codes = blocks.weights, in_blocks(codes, size)
        scale, zero = grids
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
        off = np.clip(weights * inverse + zero, stored.smallest, stored.largest)
        off -= codes
        if columns.stop % size and not scales:  # padding of the last block
            off.reshape(len(off), -1)[:, len(columns) :] = 0
        if not max(float(off.max(initial=0)), -float(off.min(initial=0))) <= HALF_STEP:
            return None
        values = (codes - zero) * scale
        values -= weights
        error, values = values.reshape(len(original), -1)[:, : len(columns)].ravel(), original.ravel()
        errors, sizes = errors + float(np.dot(error, error)), sizes + float(np.dot(values, values))
    relative = (errors / sizes) ** 0.5 if sizes else float("inf") if errors else 0.0
    return None if (scales and scales.problem()) or not relative <= IMPLAUSIBLE else relative


def _search(stored: QuantizedMatrix, match: TensorMatch, expected: ExpectedCodes) -> tuple[bool, Array | None]:
    """As `ExpectedCodes.is_searched_on`; scales of 8 bits are not searched."""
    return expected.is_searched_on(match.name, match.columns) if stored.largest == FOUR_BITS else (True, None)


def _rounding_error(
    found: MatchedMatrix, match: TensorMatch, tensor: LazyTensor, expected: ExpectedCodes
) -> RoundingError:
    four = found.stored.largest == FOUR_BITS
    feedback, weighted = expected.has_feedback(match.name) and four, expected.nearest and expected.weighted and four
    tally, kept = _Tally(lines=FEEDBACK_LINES if feedback else 0.0), expected.scales_of(match.name)
    own = _OwnCodes(found.stored, match, expected) if (expected.nearest or feedback) and not kept else None
    known = found.stored.largest is not None
    columns = slice(match.columns.start, match.columns.stop)
    for start, original in original_rows(match, tensor):
        stop = start + len(original)
        values, steps = (part(start, stop)[:, columns] for part in (found.stored.rows, found.stored.steps))
        vanished = (values == 0) & (np.abs(original) < TINY)
        error = np.where(vanished, 0, values - original)
        tally.error += float((error.astype(np.float64) ** 2).sum())
        tally.size += float((np.where(vanished, 0, original).astype(np.float64) ** 2).sum())
        off = error / steps
        if (expected.nearest and known) or feedback:
            if weighted and not tally.other:
                tally.other = _beyond_all_codes(off, found.stored.repeat[1], start)
            limit = np.inf if weighted and not feedback else FAR
            off = _without_clipping(off, found.stored.codes(start, stop)[:, columns], found.stored.largest, limit)
        tally.add(off, values / steps, start)
        if kept and not tally.other:
            largest = (
                steps * np.float32(found.stored.largest or 0) if found.stored.offsets else np.zeros((), np.float32)
            )
            dtypes = found.stored.scale.dtype, kept
            tally.other = other_values(values, original, values / steps, *dtypes, start, largest)
        elif own and not tally.other:
            tally.other = own.problem(original, off, start)
    if own and not tally.other:
        tally.other = own.closing_problem()
    relative = (tally.error / tally.size) ** 0.5 if tally.size else float("inf") if tally.error else 0.0
    return RoundingError(match.name, relative, _gross_problem(tally, relative) or tally.other)


class _OwnCodes:
    """The demands on codes that llmconv's export chose, a block of rows at a time."""

    def __init__(self, stored: QuantizedMatrix, match: TensorMatch, expected: ExpectedCodes) -> None:
        self._stored, self._expected = stored, expected
        self._columns = slice(match.columns.start, match.columns.stop)
        self._scales = ColumnScales.of(stored, match)
        self._is_known, self._importance = _search(stored, match, expected)
        self._feedback = FeedbackShare() if expected.has_feedback(match.name) and stored.largest == FOUR_BITS else None

    def problem(self, original: Array, off: Array, start: int) -> str:
        """The first problem of rows from `start` on, with errors `off` in steps without clipping; else empty."""
        if self._stored.largest is None:
            return ""
        if self._scales:
            self._scales.add(original)
        blocks = Blocks.of(self._stored, original, self._columns, start)
        far = _distances(self._stored, original, self._columns, start)
        if self._feedback:
            self._feedback.add(far > HALF_STEP)
            problem = beyond_feedback(off, self._stored.repeat[1], start) or _not_nearest(far[:, :1], start)
            return problem or (feedback_problem(blocks, start) if blocks else "")
        plain, weighted = self._expected.plain, not self._is_known
        problem = _not_nearest(far, start)
        if problem or not blocks:
            return problem
        known, every = self._importance, self._expected.every
        return scale_problem(blocks, start, plain, weighted=weighted, importance=known, every=every)

    def closing_problem(self) -> str:
        problem = self._scales.problem() if self._scales else ""
        return problem or (self._feedback.problem() if self._feedback else "")


def _without_clipping(off: Array, codes: Array, largest: int | None, limit: float) -> Array:
    """Errors in steps, at most half a step where a value is up to `limit` beyond the largest or smallest code.

    A search for the least squared error cuts off the values of extreme columns, and does so in most of their rows.
    """
    clipped = ((codes == 0) | (codes == largest)) & (np.abs(off) <= limit)
    return np.where(clipped, np.clip(off, -0.5, 0.5), off)


def _beyond_all_codes(off: Array, size: int, start: int) -> str:
    """Describes the first block of `size` columns, from row `start` on, whose scale suits none of its columns."""
    edges = np.arange(0, off.shape[1], size)
    if (odd := first_of(np.minimum.reduceat(np.abs(off), edges, axis=1) > NEAR)) is None:
        return ""
    row, block, _ = odd
    return f"all values of row {start + row}, columns {block * size} to {block * size + size - 1}, are beyond the codes"


def _distances(stored: QuantizedMatrix, original: Array, columns: slice, start: int) -> Array:
    """How far every code from row `start` on is from its original value, in steps; infinite where that is no number."""
    stop = start + len(original)
    scale, zero = (part[:, columns].astype(np.float64) for part in stored.grid(start, stop))
    codes = stored.codes(start, stop)[:, columns].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.where(scale != 0, original / scale, 0) + zero
    off = np.abs(np.clip(exact, stored.smallest, stored.largest) - codes)
    return np.where(np.isnan(off), np.inf, off)


def _not_nearest(off: Array, start: int) -> str:
    """Describes the first code from row `start` on that is not the nearest to its original value."""
    if (odd := first_of(off > HALF_STEP)) is None:
        return ""
    row, column, more = odd
    return f"the code at row {start + row}, column {column}{more} is not the nearest, by {off[row, column]:.1f} steps"


def _gross_problem(tally: _Tally, relative: float) -> str:
    near, shifted = tally.beyond / max(1, tally.count)
    if shifted > SHIFTED_SHARE:
        return tally.odd.get(NEAR) or f"{shifted:.0%} of its elements have errors beyond rounding"
    if not relative <= IMPLAUSIBLE:
        return f"its relative error is {relative:.2f}"
    if near <= NEAREST and tally.odd.get(NEAR) and not tally.lines:
        return tally.odd[NEAR]
    if tally.grows:
        return "its errors grow with its codes, so its scales are wrong"
    return tally.odd.get(FAR, "")


def original_rows(match: TensorMatch, tensor: LazyTensor, count: int = MAX_ROWS) -> Iterator[tuple[int, Array]]:
    """Blocks of `count` rows of the model's values in the orientation of the matrix, each with its first row there."""
    whole = tensor.read().T if match.transposed else None
    across = slice(match.first_column, match.first_column + len(match.columns))
    for start in range(0, len(match.rows), count):
        first = match.first_row + start
        last = match.first_row + min(start + count, len(match.rows))
        rows = whole[first:last] if whole is not None else tensor.rows(first, last)
        yield match.rows.start + start, rows[:, across].astype(np.float32)


def _sums(values: Array, along: int) -> tuple[Array, Array, Array]:
    """Sums over stretches, `[lines, stretches]`, with their starts and lengths; without short ones."""
    edges = np.arange(0, values.shape[along], STRETCH)
    sizes = np.diff([*edges, values.shape[along]])
    sums = np.add.reduceat(values, edges, axis=along)
    kept = sizes >= min(LEAST, values.shape[along])
    return (sums if along else sums.T)[:, kept], edges[kept], sizes[kept]


def _growth(steps: Array, codes: Array, along: int) -> Array:
    """t squared of the slope of errors over codes, for every stretch."""
    (products, _, sizes), (squares, _, _), (errors, _, _) = (
        _sums(values, along) for values in (steps * codes, codes**2, steps**2)
    )
    explained = products**2 / np.maximum(squares, 1e-9)
    found: Array = explained * sizes / np.maximum(errors - explained, 1e-3 * sizes)
    return found[:, sizes >= LEAST].ravel()  # fewer errors, as of a matrix of one row, are always near some line


def _stretch(far: Array, share: float, steps: Array, first: int, lines: float) -> str:
    """Describes the first stretch of a row or column with too many large errors; empty if there is none.

    In a row or column with such stretches, they must be more than the share `lines` of all.
    """
    for along in (1, 0):
        counts, edges, sizes = _sums(far.astype(np.int32), along)
        odd = counts > share * sizes
        odd &= odd.mean(axis=1, keepdims=True) > lines
        if odd.any():
            line, at = (int(x) for x in np.argwhere(odd)[0])
            part = slice(int(edges[at]), int(edges[at]) + int(sizes[at]))
            off = steps[line, part] if along else steps[part, line]
            count = int(odd.any(axis=1).sum())
            return _description("row" if along else "column", line + (first if along else 0), count, off)
    return ""


def _description(what: str, line: int, lines: int, off: Array) -> str:
    median = float(np.median(off))
    shift = round(median) if np.isfinite(median) else 0  # scales may be too large for a product with a code
    zero = (
        f"; its zero point may be wrong by {-shift:+d}" if shift and np.mean(np.abs(off - shift) <= NEAR) > 0.9 else ""
    )
    more = f" and {lines - 1} more" if lines > 1 else ""
    return f"{what} {line}{more} has errors of up to {np.abs(off).max():.1f} steps of its scale, not rounding{zero}"
