"""Blocks of GGUF from float32 weights, with the bits of llama.cpp's own quantizers.

Source: ggml `ggml-quants.c`, the functions `quantize_row_*_ref` and, with an importance matrix, `quantize_row_*_impl`,
and what they call: `make_qkx2_quants`, `make_qkx3_quants`, `make_qx_quants` and `make_qp_quants`. Equal bits need equal
roundings: everything is computed in float32, and the sum over a group adds its elements one after another. So a group
is a column of `[elements, groups]`: numpy then computes all groups at once, and adds rows in their order.

Bits differ in blocks of values below 1e-35 alone, where llama.cpp's codes overflow: their scales are zero either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from llmconv.tensors import Array

SMALLEST = np.float32(1e-15)  # the largest value of a group that counts as zero (`GROUP_MAX_EPS`)
SUPER = 256  # elements of a block of the K types
LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Quantizer:
    """One type of blocks."""

    blocks: Callable[[Array], Array]  # of float32 [blocks, elements], finite: uint8 [blocks, bytes]
    # the same of whole rows, float32 [rows, columns], with the importance of each value, of the same shape
    weighted: Callable[[Array, Array], Array] | None
    limit: float  # the largest value: the scales are then finite in float16, and no sum overflows


def _inverse(scales: Array) -> Array:
    """One divided by each scale; 0 for scales that are zero, or so small that the quotient overflows."""
    with np.errstate(divide="ignore", over="ignore"):
        found = np.float32(1) / scales
    found[~np.isfinite(found)] = 0
    return found


def _half(scales: Array) -> Array:
    """Bytes of float16, [blocks, 2 x scales]."""
    return np.ascontiguousarray(scales.astype("<f2")).view(np.uint8)


def _halves(codes: Array) -> Array:
    """Pairs of 4-bit codes [blocks, 32] in bytes: the first half low, the second high."""
    return codes[:, :16] & np.uint8(15) | codes[:, 16:] << 4


def _at(values: Array, places: Array) -> Array:
    """One value of each row, [rows, 1]."""
    found: Array = np.take_along_axis(values, places[:, None], axis=1)
    return found


def _extremes(values: Array) -> Array:
    """Of each row, the first of its values with the largest magnitude, [rows, 1]; never -0."""
    return _at(values, np.abs(values).argmax(axis=1)) + np.float32(0)


# --- blocks of 32 -----------------------------------------------------------------------------------------------------


def _q8_0(values: Array) -> Array:
    """A scale and codes, rounded half away from zero."""
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(scales)
    size = np.abs(scaled)
    whole = np.floor(size)
    codes = np.sign(scaled) * (whole + np.floor(2 * (size - whole)))
    return np.concatenate([_half(scales), codes.astype(np.int8).view(np.uint8)], axis=1)


def _centered(values: Array, middle: int) -> tuple[Array, Array]:
    """Scales [blocks, 1] such that the largest value is `-middle` of them, and codes of 0 to `2 * middle - 1`."""
    scales = _extremes(values) / np.float32(-middle)
    codes = np.trunc(values * _inverse(scales) + np.float32(middle + 0.5)).clip(0, 2 * middle - 1)
    return scales, _without_overflow(codes, scales)


def _ranged(values: Array, most: int) -> tuple[Array, Array]:
    """Scales and minima in float16, bytes [blocks, 4], and codes of 0 to `most` from the minimum to the maximum."""
    least, largest = _at(values, values.argmin(axis=1)), _at(values, values.argmax(axis=1))  # of -0 and 0 the first
    scales = (largest - least) / np.float32(most)
    codes = np.trunc((values - least) * _inverse(scales) + np.float32(0.5)).clip(0, most)
    return np.concatenate([_half(scales), _half(least)], axis=1), _without_overflow(codes, scales)


def _without_overflow(codes: Array, scales: Array) -> Array:
    """The codes as bytes, 0 where one divided by the scale overflows, as llama.cpp has them; the scale is 0 then."""
    found: Array = codes.astype(np.uint8)
    found[(scales != 0)[:, 0] & (_inverse(scales) == 0)[:, 0]] = 0
    return found


def _fifth_bits(codes: Array) -> Array:
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def _q4_0(values: Array) -> Array:
    scales, codes = _centered(values, 8)
    return np.concatenate([_half(scales), _halves(codes)], axis=1)


def _q5_0(values: Array) -> Array:
    scales, codes = _centered(values, 16)
    return np.concatenate([_half(scales), _fifth_bits(codes), _halves(codes)], axis=1)


def _q4_1(values: Array) -> Array:
    head, codes = _ranged(values, 15)
    return np.concatenate([head, _halves(codes)], axis=1)


def _q5_1(values: Array) -> Array:
    head, codes = _ranged(values, 31)
    return np.concatenate([head, _fifth_bits(codes), _halves(codes)], axis=1)


# --- blocks of 256, of groups with scales of their own ----------------------------------------------------------------


def _columns(values: Array, size: int) -> Array:
    """Groups of `size` elements as columns, [size, groups]."""
    return np.ascontiguousarray(values.reshape(-1, size).T)


def _rows(columns: Array) -> Array:
    """Columns of groups as blocks, [blocks, 256]."""
    return np.ascontiguousarray(columns.T).reshape(-1, SUPER)


def _sum(terms: Array) -> Array:
    """The sums [groups] of columns, each from its first element to its last, rounded after each addition."""
    single = terms.shape[1] == 1  # which numpy would add in pairs
    found: Array = np.add.accumulate(terms, axis=0)[-1] if single else np.add.reduce(terms, axis=0)
    return found


@dataclass(frozen=True)
class Fit:
    """Scales and minima of groups, float32 [groups] each, and what gives their codes."""

    scale: Array
    least: Array  # not above zero
    factor: Array  # codes are the nearest integers of `factor * (value - start)`
    start: Array


def _fit_ranges(values: Array, weights: Array, most: int, steps: tuple[float, float, int]) -> Fit:
    """The scales and minima with the least weighted squares of errors (`make_qkx2_quants`, `make_qkx3_quants`).

    Args:
        values: float32 [elements, groups].
        weights: of the values, not negative; of the same shape.
        most: the largest code, the smallest is 0.
        steps: what is added to `most` for the first range that is tried, and for each further one, and their number.
    """
    sum_w, sum_x = _sum(weights), _sum(weights * values)
    largest, least = values.max(axis=0), _at(values.T, values.argmin(axis=0))[:, 0]  # of -0 and 0 the first
    least = np.where(least > 0, np.float32(0), least)
    factor = np.float32(most) / (largest - least)
    flat = ~np.isfinite(factor)  # all values are the same, and not positive
    factor[flat] = 0
    scale, start = np.where(flat, np.float32(0), np.float32(1) / factor), least
    best_factor = factor
    best = _squares(scale, _nearest((values - least) * factor, most), least, values, weights)
    first, step, count = (np.float32(steps[0]), np.float32(steps[1]), steps[2])
    for number in range(count + 1):
        factor = (first + step * np.float32(number) + np.float32(most)) / (largest - least)
        scaled = values - least
        scaled *= factor
        codes = _nearest(scaled, most)
        weighted = weights * codes
        sum_l, sum_l2, sum_xl = _sum(weighted), _sum(weighted * codes), _sum(weighted * values)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_least = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        above = new_least > 0
        new_scale, new_least = np.where(above, sum_xl / sum_l2, new_scale), np.where(above, np.float32(0), new_least)
        error = _squares(new_scale, codes, new_least, values, weights)
        better = (determinant > 0) & (error < best) & ~flat
        best, scale = np.where(better, error, best), np.where(better, new_scale, scale)
        best_factor, start = np.where(better, factor, best_factor), np.where(better, least, start)
        least = np.where(better, new_least, least)
    return Fit(scale, least, best_factor, start)


def _nearest(scaled: Array, most: int, least: int = 0) -> Array:
    """The nearest codes, in place; half to even."""
    return np.rint(scaled, out=scaled).clip(least, most, out=scaled)


def _squares(scale: Array, codes: Array, least: Array, values: Array, weights: Array) -> Array:
    """The weighted squares of errors [groups]."""
    difference = scale * codes
    difference += least
    difference -= values
    difference *= difference
    difference *= weights
    return _sum(difference)


def _six_bits(scales: Array, minima: Array) -> Array:
    """Eight scales and eight minima below 64, uint8 [blocks, 8] each, in 12 bytes (`get_scale_min_k4`)."""
    return np.concatenate(
        [
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            minima[:, :4] | minima[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | minima[:, 4:] << 4,
        ],
        axis=1,
    )


def _quotients(values: Array) -> tuple[Array, Array]:
    """Scales or minima of a block [blocks, 8], not negative, as codes of 6 bits and a scale in float16, [blocks, 1]."""
    largest = values.max(axis=1, keepdims=True, initial=0)
    inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
    return _nearest(inverse * values, 63).astype(np.uint8), (largest / np.float32(63)).astype("<f2")


def _ranges(values: Array, most: int, steps: tuple[float, float, int]) -> tuple[Array, Array]:
    """The first 16 bytes of blocks of Q4_K or Q5_K, and codes uint8 [blocks, 256]."""
    columns = _columns(values, 32)
    with np.errstate(all="ignore"):  # of groups whose values are all the same, or next to zero
        weights = np.sqrt(_sum(columns * columns) / np.float32(32)) + np.abs(columns)
        fit = _fit_ranges(columns, weights, most, steps)
        scales = _quotients(fit.scale.reshape(-1, 8))
        return _packed_ranges(columns, fit, scales, _quotients(np.float32(0) - fit.least.reshape(-1, 8)), most)


def _packed_ranges(
    columns: Array, fit: Fit, scales: tuple[Array, Array], minima: tuple[Array, Array], most: int
) -> tuple[Array, Array]:
    """What `_ranges` returns, of scales and minima as codes uint8 [blocks, 8] and a float16 [blocks, 1] each."""
    divisor, offset = ((one.astype(np.float32) * codes).reshape(-1) for codes, one in (scales, minima))
    codes = _nearest((columns + offset) / divisor, most)
    if (zero := divisor == 0).any():  # those of the search then
        codes[:, zero] = _nearest(fit.factor[zero] * (columns[:, zero] - fit.start[zero]), most)
    head = np.concatenate([_half(scales[1]), _half(minima[1]), _six_bits(scales[0], minima[0])], axis=1)
    return head, _rows(np.nan_to_num(codes).astype(np.uint8))


def _low_nibbles(codes: Array) -> Array:
    """Bytes [blocks, 128] of the low four bits: of each 64 codes the first half low, the second high."""
    pairs = codes.reshape(len(codes), 4, 2, 32)
    return (pairs[:, :, 0] & np.uint8(15) | pairs[:, :, 1] << 4).reshape(len(codes), 128)


def _q4_k(values: Array) -> Array:
    head, codes = _ranges(values, 15, (-1.0, 0.1, 20))
    return np.concatenate([head, _low_nibbles(codes)], axis=1)


def _q5_k(values: Array) -> Array:
    return _with_fifth_bits(*_ranges(values, 31, (-0.5, 0.1, 15)))


def _with_fifth_bits(head: Array, codes: Array) -> Array:
    high = np.packbits(codes.reshape(-1, 8, 32) >> 4, axis=1, bitorder="little").reshape(-1, 32)
    return np.concatenate([head, high, _low_nibbles(codes)], axis=1)


def _fit_centered(values: Array, middle: int, weights: Array) -> tuple[Array, Array]:
    """Scales and factors [groups] of groups `[elements, groups]`, with codes from `-middle` (`make_qx_quants`).

    Codes are the nearest integers of factor times value; groups of zeros have the scale and factor 0.
    """
    extreme = _extremes(values.T)[:, 0]
    weighted = weights * values

    def sums(factor: Array) -> tuple[Array, Array]:
        codes = _nearest(factor * values, middle - 1, -middle)
        return _sum(weighted * codes), _sum(weights * codes * codes)

    best_factor = np.float32(-middle) / extreme
    sum_xl, sum_l2 = sums(best_factor)
    scale = np.where(sum_l2 != 0, sum_xl / sum_l2, np.float32(0))
    best = scale * sum_xl
    for number in (*range(-9, 0), *range(1, 10)):
        factor = -(np.float32(middle) + np.float32(0.1) * np.float32(number)) / extreme
        sum_xl, sum_l2 = sums(factor)
        better = (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2)
        scale = np.where(better, sum_xl / sum_l2, scale)
        best = np.where(better, scale * sum_xl, best)
        best_factor = np.where(better, factor, best_factor)
    zero = np.abs(extreme) < SMALLEST
    return np.where(zero, np.float32(0), scale), np.where(zero, np.float32(0), best_factor)


def _q6_k(values: Array, importance: Array | None = None) -> Array:
    columns = _columns(values, 16)
    weights = columns * columns if importance is None else _columns(importance, 16)
    with np.errstate(all="ignore"):  # of groups of zeros
        fitted, factor = _fit_centered(columns, 32, weights)
        scales = fitted.reshape(-1, 16)
        extreme = _extremes(scales)
        inverse = np.float32(-128) / extreme
        scale = (np.float32(1) / inverse).astype("<f2")
        small = _nearest(inverse * scales, 127, -128)
        divisor = (scale.astype(np.float32) * small).reshape(-1)
        codes = _nearest(columns / divisor, 31, -32) + np.float32(32)
        if (zero := divisor == 0).any():  # those of the search then
            found = _nearest(factor[zero] * columns[:, zero], 31, -32) + np.float32(32)
            codes[:, zero] = np.where(factor[zero] == 0, np.float32(0), found)
    whole = _rows(np.nan_to_num(codes).astype(np.uint8)).reshape(-1, 2, 4, 32)
    low = whole[:, :, :2] & np.uint8(15) | whole[:, :, 2:] << 4
    high = whole >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    made = [low.reshape(-1, 128), high.reshape(-1, 64), np.nan_to_num(small).astype(np.int8).view(np.uint8)]
    blocks = np.concatenate([*made, _half(scale)], axis=1)
    blocks[np.abs(extreme)[:, 0] < SMALLEST] = 0
    return blocks


# --- with an importance matrix ----------------------------------------------------------------------------------------


def _weights(values: Array, importance: Array, factor: int) -> Array:
    """The importance times how large a value is, `[rows, columns]`; `factor` of the mean square of its row is added."""
    squares = values * values
    mean = np.float32(factor) * _sum(np.ascontiguousarray(squares.T)) / np.float32(values.shape[1])
    found: Array = importance * np.sqrt(mean[:, None] + squares)
    return found


def _weighted_centered(values: Array, importance: Array, middle: int) -> tuple[Array, Array]:
    """Scales [blocks, 1] and codes of 0 to `2 * middle - 1` of blocks of 32."""
    columns = _columns(values, 32)
    with np.errstate(all="ignore"):  # of groups of zeros
        scales, factor = _fit_centered(columns, middle, _columns(_weights(values, importance, 1), 32))
        codes = _nearest(factor * columns, middle - 1, -middle) + np.float32(middle)
    codes[:, factor == 0] = 0
    return scales[:, None], np.ascontiguousarray(np.nan_to_num(codes).astype(np.uint8).T)


def _weighted_ranged(values: Array, importance: Array, most: int) -> tuple[Array, Array]:
    """Scales and minima in float16, bytes [blocks, 4], and codes of 0 to `most`, of blocks of 32."""
    columns = _columns(values, 32)
    with np.errstate(all="ignore"):  # of groups whose values are all the same
        fit = _fit_ranges(columns, _columns(_weights(values, importance, 1), 32), most, WEIGHTED_STEPS)
        codes = _nearest(fit.factor * (columns - fit.start), most)
    head = np.concatenate([_half(fit.scale[:, None]), _half(fit.least[:, None])], axis=1)
    return head, np.ascontiguousarray(np.nan_to_num(codes).astype(np.uint8).T)


def _weighted_ranges(values: Array, importance: Array, most: int) -> tuple[Array, Array]:
    """As `_ranges`; the scales and minima of a block are fitted with weights, too."""
    columns = _columns(values, 32)
    with np.errstate(all="ignore"):  # of groups whose values are all the same, or next to zero
        weights = _columns(_weights(values.reshape(-1, SUPER), importance.reshape(-1, SUPER), 2), 32)
        fit = _fit_ranges(columns, weights, most, WEIGHTED_STEPS)
        sums = _columns(_sum(weights), 8)
        scales = _fit_positive(_columns(fit.scale, 8), sums, 63)
        minima = _fit_positive(_columns(np.float32(0) - fit.least, 8), sums, 63)
        return _packed_ranges(columns, fit, scales, minima, most)


WEIGHTED_STEPS = (-0.9, 0.05, 36)


def _fit_positive(values: Array, weights: Array, most: int) -> tuple[Array, Array]:
    """Codes uint8 [groups, elements] of 0 to `most` and float16 scales [groups, 1] of `[elements, groups]`.

    The scale is searched first, then code after code is changed if that is better (`make_qp_quants`).
    """
    largest = values.max(axis=0)

    def error(factor: Array) -> Array:
        difference = values - np.float32(1) / factor * _nearest(factor * values, most)
        return _sum(weights * difference * difference)

    best_factor = np.float32(most) / largest
    best = error(best_factor)
    for number in (*range(-4, 0), *range(1, 5)):
        factor = (np.float32(0.1) * np.float32(number) + np.float32(most)) / largest
        better = (found := error(factor)) < best
        best, best_factor = np.where(better, found, best), np.where(better, factor, best_factor)
    codes = _nearest(best_factor * values, most)
    weighted = weights * values
    sum_xl, sum_l2 = _sum(weighted * codes), _sum(weights * codes * codes)
    for at in [*range(len(values))] * 5:
        code, weight = codes[at], weights[at]
        part_xl, part_l2 = sum_xl - weighted[at] * code, sum_l2 - weight * code * code
        other = np.minimum(np.rint(values[at] * part_l2 / part_xl), np.float32(most))
        new_xl, new_l2 = part_xl + weighted[at] * other, part_l2 + weight * other * other
        better = (part_xl > 0) & (part_l2 > 0) & (other != code) & (other >= 0)
        better &= new_xl * new_xl * sum_l2 > sum_xl * sum_xl * new_l2
        codes[at] = np.where(better, other, code)
        sum_xl, sum_l2 = np.where(better, new_xl, sum_xl), np.where(better, new_l2, sum_l2)
    zero = largest < SMALLEST
    codes[:, zero] = 0
    scale = np.where((sum_l2 > 0) & ~zero, sum_xl / sum_l2, np.float32(0))
    return np.ascontiguousarray(np.nan_to_num(codes).astype(np.uint8).T), scale.astype("<f2")[:, None]


def _weighted_q4_0(values: Array, importance: Array) -> Array:
    scales, codes = _weighted_centered(values, importance, 8)
    return np.concatenate([_half(scales), _halves(codes)], axis=1)


def _weighted_q5_0(values: Array, importance: Array) -> Array:
    scales, codes = _weighted_centered(values, importance, 16)
    return np.concatenate([_half(scales), _fifth_bits(codes), _halves(codes)], axis=1)


def _weighted_q4_1(values: Array, importance: Array) -> Array:
    head, codes = _weighted_ranged(values, importance, 15)
    return np.concatenate([head, _halves(codes)], axis=1)


def _weighted_q5_1(values: Array, importance: Array) -> Array:
    head, codes = _weighted_ranged(values, importance, 31)
    return np.concatenate([head, _fifth_bits(codes), _halves(codes)], axis=1)


def _weighted_q4_k(values: Array, importance: Array) -> Array:
    head, codes = _weighted_ranges(values, importance, 15)
    return np.concatenate([head, _low_nibbles(codes)], axis=1)


def _weighted_q5_k(values: Array, importance: Array) -> Array:
    return _with_fifth_bits(*_weighted_ranges(values, importance, 31))


QUANTIZERS: Mapping[str, Quantizer] = {
    "Q8_0": Quantizer(_q8_0, None, 127 * LARGEST_HALF),
    "Q4_0": Quantizer(_q4_0, _weighted_q4_0, 8 * LARGEST_HALF),
    "Q4_1": Quantizer(_q4_1, _weighted_q4_1, LARGEST_HALF),
    "Q5_0": Quantizer(_q5_0, _weighted_q5_0, 16 * LARGEST_HALF),
    "Q5_1": Quantizer(_q5_1, _weighted_q5_1, LARGEST_HALF),
    "Q4_K": Quantizer(_q4_k, _weighted_q4_k, LARGEST_HALF),
    "Q5_K": Quantizer(_q5_k, _weighted_q5_k, LARGEST_HALF),
    "Q6_K": Quantizer(_q6_k, _q6_k, LARGEST_HALF),
}
"""Types that are written, by llama.cpp's name."""
