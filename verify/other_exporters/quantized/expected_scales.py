"""What scales and zero points must be in a folder that llmconv wrote: the nearest code is judged given these.

A coarse scale, of which every code is the zero point, would erase a block although each code is the nearest one. So
plain rounding is demanded exactly, and a search within what its grid can produce (docs/quantization.md, `--method`):

* symmetric: `scale = extreme / -2 ** (bits - 1)`, zero point `2 ** (bits - 1)`, with the value of largest magnitude;
* else `scale = range / (2 ** bits - 1)`, zero point `-low / scale`, with 0 in the range;
* one scale per column: `extreme / 127`, or 1 for a column of zeros.

A search tries ranges of 14 to 15.75 steps (6.4 to 8.4 on one side if symmetric), then some half as far apart around
the best with zero points up to one off, and fits the scale by least squares, `sum(f * c * w) / sum(f * c * c)`: a mean
of the quotients w / c, whatever the factors f are. A weight with the code c is between `abs(c) - 1/2` and
`abs(c) + 1/2` tried steps, and further out only where codes end: 2.6 steps. This bounds the quotients.
"""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.quantized_matrix import TINY as SMALL
from llmconv.verify.other_exporters.quantized.weight_blocks import EXACT, Blocks

TINY = np.float32(SMALL)
"""A block with a smaller range is stored as zeros."""
FOUR_BITS = 15
"""The largest code of 4 bits."""
HALF = np.float32(0.49999997)
"""Added and truncated, ties go away from zero."""

POINT = 0.5 + 1e-3
"""Maximum distance of a zero point of plain rounding from its quotient."""

RANGES = 0.5 / 15.925, 3.6 / 13.825
"""Least and largest scale of a search, as a share of the range of a block."""
EXTREMES = 0.5 / 8.6, 1.5 / 6.2
"""The same if it is symmetric, as a share of the extreme value."""
POINTS = 14.0, 15.75, 1.501
"""Zero points of a search: `-low / range` times the first to the second, and so far from there."""

FITTED = 14
"""Steps of the first range that a search tries, which the result is not worse than."""
WORSE = 1.02
"""Maximum quotient of root mean square errors that rounding in float32 explains."""
ERASED = 0.75
"""Maximum root mean square error of a block as a share of its weights; at most 0.55 in draws without heavy tails."""
MOVED = 4
"""Steps by which error feedback moves weights before their scale is chosen."""
SQUARES = 1e-32, 1e34
"""Sums of squares that float32 holds with all digits; between other ones a search compares little more than noise."""


def plain(blocks: Blocks) -> Array:
    """Where scales and zero points are those of plain rounding, [rows, blocks]; of 8 bits it is always symmetric.

    Args:
        blocks: of a matrix.
    """
    scale = np.where(np.abs(blocks.extreme) < TINY, 0.0, blocks.extreme / -blocks.middle)
    symmetric: Array = blocks.is_middle & blocks.near(scale)
    if blocks.largest > FOUR_BITS:
        return symmetric
    empty = blocks.high - blocks.low < TINY
    scale = np.where(empty, 0.0, blocks.extent / blocks.largest)
    point = np.where(empty, blocks.middle, -blocks.low / blocks.extent * blocks.largest)
    ranged: Array = blocks.near(scale) & (np.abs(blocks.zeros - point) <= POINT)
    return symmetric | ranged


def searched(blocks: Blocks) -> Array:
    """Where scales and zero points can be those of a search, whatever the importance of columns, [rows, blocks].

    Args:
        blocks: of a matrix.
    """
    empty = np.abs(blocks.extreme) < TINY
    share = np.divide(-blocks.scales, blocks.extreme, out=np.zeros_like(blocks.scales), where=~empty)
    symmetric = blocks.is_middle & np.where(
        empty, blocks.near(np.zeros(1)), _between(blocks, share, EXTREMES, blocks.extreme)
    )
    empty, share, point = blocks.high - blocks.low < TINY, blocks.scales / blocks.extent, -blocks.low / blocks.extent
    first, last, around = POINTS
    fits = (blocks.zeros >= point * first - around) & (blocks.zeros <= point * last + around)
    ranged: Array = np.where(
        empty, blocks.near(np.zeros(1)) & blocks.is_middle, fits & _between(blocks, share, RANGES, blocks.extent)
    )
    return symmetric | ranged


def _between(blocks: Blocks, share: Array, limits: tuple[float, float], size: Array) -> Array:
    """Where scales that are a share of `size` are within limits, up to their rounding."""
    rounding = blocks.smallest / np.maximum(np.abs(size), float(TINY))
    least, most = (limit * (1 + sign * blocks.relative) for limit, sign in zip(limits, (-1, 1), strict=True))
    found: Array = (share >= least - rounding) & (share <= most + rounding)
    return found


def as_exact(blocks: Blocks) -> Array:
    """Where the squared error is that of a search in which all columns count alike, or less, [rows, blocks].

    Such a search is not worse than the first range that it tries; a symmetric one tries that of plain rounding, too.

    Args:
        blocks: of a matrix.
    """
    weights = blocks.weights.astype(np.float64)
    size = (weights**2).sum(axis=2)
    limit = _ranged_error(blocks)
    limit = np.where(blocks.is_middle, np.maximum(limit, _symmetric_error(blocks)), limit)
    rounding = _rounding(blocks, np.sqrt(size))
    found = ((blocks.values - weights) ** 2).sum(axis=2)
    compared = (size >= SQUARES[0]) & (size <= SQUARES[1])
    exact: Array = ~compared | (np.sqrt(found) <= WORSE * np.sqrt(limit + EXACT * size) + rounding)
    return exact


def not_erased(blocks: Blocks) -> Array:
    """Where the error is less than `ERASED` of the weights, [rows, blocks]; with any importance of columns it is.

    Args:
        blocks: of a matrix.
    """
    weights = blocks.weights.astype(np.float64)
    size, error = np.sqrt((weights**2).sum(axis=2)), np.sqrt(((blocks.values - weights) ** 2).sum(axis=2))
    kept: Array = (error <= ERASED * size + _rounding(blocks, size)) | (blocks.extent <= 2 * TINY)
    return kept


def _rounding(blocks: Blocks, size: Array) -> Array:
    """What the rounding of scales adds to an error."""
    added: Array = blocks.relative * size + blocks.smallest * blocks.largest * blocks.weights.shape[2] ** 0.5
    return added


def _ranged_error(blocks: Blocks) -> Array:
    """Squared error of the first range that is tried; its codes are computed in float32, as those of a search."""
    extent = blocks.high - blocks.low
    width = np.divide(np.float32(FITTED), extent, out=np.zeros_like(extent), where=extent >= TINY)
    zero = _rounded(-blocks.low * width, blocks.largest)
    return _fitted_error(blocks, width, zero)


def _symmetric_error(blocks: Blocks) -> Array:
    """Squared error of the range of symmetric plain rounding."""
    extreme = blocks.extreme.astype(np.float32)
    width = np.divide(np.float32(-blocks.middle), extreme, out=np.zeros_like(extreme), where=np.abs(extreme) >= TINY)
    return _fitted_error(blocks, width, np.full_like(width, np.float32(blocks.middle)))


def _fitted_error(blocks: Blocks, width: Array, zero: Array) -> Array:
    """Squared error of the codes of weights times `width`, with the scale of the least squared error."""
    codes = _rounded(blocks.weights * width[..., None] + zero[..., None], blocks.largest) - zero[..., None]
    codes, weights = codes.astype(np.float64), blocks.weights.astype(np.float64)
    squares = (codes**2).sum(axis=2)
    scale = np.divide((codes * weights).sum(axis=2), squares, out=np.zeros(width.shape), where=squares > 0)
    error: Array = ((codes * scale[..., None] - weights) ** 2).sum(axis=2)
    return error


def _rounded(values: Array, largest: int) -> Array:
    """Values rounded to codes, ties away from zero."""
    codes: Array = np.trunc(np.clip(values, np.float32(0), np.float32(largest)) + HALF)
    return codes


def scale_problem(blocks: Blocks, first: int, *, is_plain: bool, weighted: bool) -> str:
    """Describes the first block whose scale or zero point an export would not choose; empty if there is none.

    Args:
        blocks: of a matrix.
        first: number of the first row.
        is_plain: scales come from extreme values alone.
        weighted: scales suit the columns that matter on a text.
    """
    if is_plain or blocks.largest > FOUR_BITS:
        return _description(blocks, plain(blocks), first, "not that of its weights")
    if problem := _description(blocks, searched(blocks), first, "beyond what a search tries"):
        return problem
    near = not_erased(blocks) if weighted else as_exact(blocks)
    return _description(blocks, near, first, "not that of the least error")


def feedback_problem(blocks: Blocks, first: int) -> str:
    """The same for error feedback (GPTQ), whose scales suit weights that errors before them moved.

    They move by up to `MOVED` of the coarsest steps of their row; those of the first block do not.

    Args:
        blocks: of whole rows of a matrix.
        first: number of the first row.
    """
    extent = blocks.extent + 2 * MOVED * blocks.extent.max(axis=1, keepdims=True, initial=0) / blocks.largest
    fits = np.abs(blocks.scales) <= RANGES[1] * extent * (1 + blocks.relative) + blocks.smallest
    fits[:, :1] &= searched(blocks)[:, :1]
    return _description(blocks, fits, first, "beyond what a search tries")


def _description(blocks: Blocks, fits: Array, first: int, what: str) -> str:
    odd = np.argwhere(~fits)
    if not len(odd):
        return ""
    row, block = (int(at) for at in odd[0])
    more = f" and {len(odd) - 1:,} more" if len(odd) > 1 else ""
    found = f"{blocks.scales[row, block]:.3g}, zero point {blocks.zeros[row, block]:.0f}"
    return f"the scale of row {first + row}, block {block}{more} is {what} ({found})"
