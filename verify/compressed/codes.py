"""Whether stored codes are the nearest to their weights, and scales those of a scheme: one function per kind of weight.

Everything is computed again from the weights, in float64 where no scheme says otherwise. A code is the nearest where
weight / scale lies between the middles of its value and its neighbors'; at an exact middle both are. Scales are those
of the formulas of compressed-tensors (`calculate_qparams`, `generate_gparam`), or of the search of llmconv.

A search on a text has scales for columns that matter there, which are not known here: they must be among those that it
tries. Codes with error feedback (GPTQ) are not the nearest: errors of a block must nearly cancel each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from llmconv.quantized_weights.float4 import GLOBAL, PACKED, SCALE, Float4Weight
from llmconv.quantized_weights.methods.mxfp4 import BLOCK as COLUMNS
from llmconv.quantized_weights.methods.mxfp4 import BLOCKS, SCALES, Mxfp4Experts
from llmconv.quantized_weights.packed_weight import GroupedWeight, PackedWeight, ScaledWeight
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor, in_memory
from llmconv.verify.other_exporters.quantized.expected_scales import (
    Blocks,
    FeedbackShare,
    beyond_feedback,
    feedback_problem,
    first_of,
    in_blocks,
    scale_problem,
)

AT_ONCE = 1 << 20  # elements that are compared at once
SLACK = 2.0**-22  # of a quotient in float32 near the middle of two codes
BLOCK = 128
HALF, CLIPPED, IMPLAUSIBLE = 0.5 + 1e-5, 2.0, 0.5
"""Steps from the nearest code; steps beyond the last code that a search cuts off; relative error of a matrix."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Bounds:
    """By code as an unsigned byte: its value, and between which quotients it is the nearest; none for NaN."""

    values: Array
    low: Array
    high: Array

    @classmethod
    def of(cls, values: Array) -> Bounds:
        known = np.unique(values[np.isfinite(values)] + 0.0)
        middles = (known[1:] + known[:-1]) / 2
        slack = np.abs(middles) * SLACK
        low, high = np.append(-np.inf, middles - slack), np.append(middles + slack, np.inf)
        place = np.searchsorted(known, np.where(np.isfinite(values), values, 0) + 0.0)
        odd = ~np.isfinite(values)
        return cls(values, np.where(odd, np.inf, low[place]), np.where(odd, -np.inf, high[place]))

    def wrong(self, codes: Array, quotients: Array) -> Array:
        found: Array = (quotients < self.low[codes]) | (quotients > self.high[codes])
        return found


FLOAT8 = Bounds.of(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))
INT8 = Bounds.of(np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float64))
FLOAT4 = Bounds.of(np.concatenate([E2M1, -E2M1]))


@dataclass
class Findings:
    """What is odd about one weight, and how far its values are from the model's."""

    name: str
    problems: list[str] = field(default_factory=list)
    error: float = 0.0  # sums of squares: of value - weight, and of weights
    size: float = 0.0
    feedback: FeedbackShare = field(default_factory=FeedbackShare)

    @property
    def relative_error(self) -> float:
        return float(np.sqrt(self.error / self.size)) if self.size else 0.0

    def add(self, what: str, odd: Array, first: int, found: Array | None = None, wanted: Array | None = None) -> None:
        """Notes the first true element of `odd` [rows, columns], whose first row has the number `first`."""
        if (place := first_of(odd)) is None or self.problems:
            return
        row, column, more = place
        values = "" if found is None or wanted is None else f": {found[row, column]:.6g}, not {wanted[row, column]:.6g}"
        self.problems.append(f"`{self.name}` has {what} at row {first + row}, column {column}{more}{values}")

    def compare(self, bounds: Bounds, codes: Array, scales: Array, weights: Array, first: int) -> None:
        """Codes uint8, float64 scales and weights of some rows, all [rows, columns]."""
        quotients = np.divide(weights, scales, out=np.zeros_like(weights), where=scales != 0)
        values = bounds.values[codes] * scales
        self.measure(values, weights)
        self.add("a code that is not the nearest", bounds.wrong(codes, quotients), first, values, weights)

    def measure(self, values: Array, weights: Array) -> None:
        with np.errstate(invalid="ignore"):
            self.error += float(np.nansum((values - weights) ** 2))
        self.size += float((weights**2).sum())


@dataclass(frozen=True)
class Rounding:
    """How integers of 4 bits were chosen; of other codes nothing is."""

    plain: bool = False  # scales are those of extreme values, not of a search
    weighted: bool = False  # scales suit the columns that matter on a text
    feedback: bool = False  # codes make up for the errors of others (GPTQ)
    symmetric: bool = True  # every zero point is the middle code


def audit_weight(
    weight: PackedWeight, original: LazyTensor, dtype: DType, scheme: Mapping[str, Any], rounding: Rounding
) -> Findings:
    """Compares a stored weight with the one that it was made of, whose scales have this `dtype`.

    `scheme` are the fields of its `weights`.
    """
    found = Findings(weight.name)
    if weight.shape != original.shape:
        found.problems.append(f"`{weight.name}` has shape {list(weight.shape)}, not {list(original.shape)}")
        return found
    check = next(check for kind, check in CHECKS.items() if isinstance(weight, kind))
    step = max(1, AT_ONCE // prod(original.shape[1:]))
    step = max(BLOCK, step // BLOCK * BLOCK) if scheme.get("strategy") == "block" else step
    for first in range(0, original.shape[0], step):
        rows = original.rows(first, min(first + step, original.shape[0])).astype(np.float32)
        check(weight, rows, first, _Frame(found, dtype.numpy, scheme, rounding))
    if rounding.feedback and not found.problems:
        if problem := found.feedback.problem():
            found.problems.append(f"`{weight.name}`: {problem}")
        elif not found.relative_error <= IMPLAUSIBLE:
            found.problems.append(f"`{weight.name}` has a relative error of {found.relative_error:.2f}")
    return found


@dataclass(frozen=True)
class _Frame:
    """What all rows of a weight share."""

    found: Findings
    dtype: np.dtype[Any]  # of the weight, in which scales are computed
    scheme: Mapping[str, Any]
    rounding: Rounding

    def rounded(self, values: Array) -> Array:
        """float32 as numbers of the weight's dtype."""
        with np.errstate(over="ignore"):
            found: Array = values.astype(self.dtype).astype(np.float32)
        return found


def _scaled(weight: PackedWeight, rows: Array, first: int, frame: _Frame) -> None:
    """8 bits: the scale of a channel or block is its largest magnitude / 448 or 127.5; of zeros the dtype's epsilon."""
    assert isinstance(weight, ScaledWeight)
    codes = weight.parts[weight.codes].rows(first, first + len(rows))
    height, width = weight.block
    low, high = first // height, -(-(first + len(rows)) // height)
    scales = weight.parts[weight.scales].rows(low, high)
    edges = [np.arange(0, size, part) for size, part in zip(rows.shape, weight.block, strict=True)]
    peaks = np.maximum.reduceat(np.maximum.reduceat(np.abs(rows), edges[0], axis=0), edges[1], axis=1)
    wanted = frame.rounded(peaks / np.float32(127.5 if codes.dtype == np.int8 else 448))
    wanted = np.where(wanted == 0, np.float32(ml_dtypes.finfo(frame.dtype).eps), wanted)
    same = scales.dtype == frame.dtype
    frame.found.add(
        "a scale that is not its scheme's", (scales.astype(np.float32) != wanted) | (not same), low, scales, wanted
    )
    spread = np.repeat(np.repeat(scales.astype(np.float64), height, axis=0)[: len(rows)], width, axis=1)
    bounds = INT8 if codes.dtype == np.int8 else FLOAT8
    frame.found.compare(bounds, codes.view(np.uint8), spread[:, : rows.shape[1]], rows.astype(np.float64), first)


def _float4(weight: PackedWeight, rows: Array, first: int, frame: _Frame) -> None:
    """4-bit floats: exponents of two, or e4m3 that are multiplied with the global scale; an eighth where that is 0."""
    assert isinstance(weight, Float4Weight)
    stop = first + len(rows)
    stored = weight.parts[weight.stem + SCALE].rows(first, stop)
    peaks = np.abs(rows).reshape(len(rows), -1, weight.size).max(axis=-1)
    if stored.dtype == np.uint8:
        share, exponent = np.frexp(peaks.astype(np.float64))  # 1.75 = 2 · 0.875
        wanted = np.maximum(np.where(peaks > 0, exponent - 1 + (share >= 0.875) - 2 + 127, 0), 0)
    else:
        with np.errstate(over="ignore"):
            product = np.minimum(frame.rounded(peaks / np.float32(6)) * weight.whole, np.float32(448))
        wanted = product.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        wanted = np.where(wanted == 0, np.float32(0.125), wanted)
    frame.found.add("a scale that is not its scheme's", stored.astype(np.float32) != wanted, first, stored, wanted)
    scales = np.repeat(weight.scales(first, stop).astype(np.float64), weight.size, axis=1)
    pairs = weight.parts[weight.stem + PACKED].rows(first, stop)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(rows.shape)
    frame.found.compare(FLOAT4, codes, scales, rows.astype(np.float64), first)


def _stacked(weight: PackedWeight, rows: Array, first: int, frame: _Frame) -> None:
    """MXFP4 in stacks, [experts, K, N] as gpt-oss is released: each expert by itself, as [N, K]."""
    assert isinstance(weight, Mxfp4Experts)
    name, found = weight.name, frame.found
    for expert, values in enumerate(rows, first):
        matrix = np.ascontiguousarray(values.T)
        stored = [weight.parts[name + end].rows(expert, expert + 1)[0] for end in (BLOCKS, SCALES)]
        parts = {
            end: in_memory(one.reshape(len(matrix), -1), BY_NAME["uint8"])
            for end, one in zip((name + PACKED, name + SCALE), stored, strict=True)
        }
        one = Float4Weight(name, parts, (len(matrix), matrix.shape[1]), name, COLUMNS)
        found.name = f"{name}[{expert}]"  # in messages about it
        for start in range(0, len(matrix), step := max(1, AT_ONCE // matrix.shape[1])):
            _float4(one, matrix[start : start + step], start, frame)
    found.name = name


def _integers(weight: PackedWeight, rows: Array, first: int, frame: _Frame) -> None:
    """4-bit integers: scales and zero points of llmconv's search, which is repeated, or of the extreme values."""
    assert isinstance(weight, GroupedWeight)
    stop, size, rounding = first + len(rows), int(frame.scheme["group_size"]), frame.rounding
    stored = weight.read_scales()[first:stop]
    zeros = weight.read_zeros()[first:stop] if weight.read_zeros else np.full(stored.shape, weight.levels // 2)
    wide = rows.astype(np.float64)
    scales, points = (np.repeat(grid.astype(np.float64), size, axis=1) for grid in (stored, zeros))
    codes = weight.codes(first, stop)
    values = (codes - points) * scales
    blocks = Blocks(
        in_blocks(rows, size),
        stored.astype(np.float64),
        zeros.astype(np.float64),
        lambda: values,
        weight.levels - 1,
        frame.dtype,
        rounding.symmetric,
    )
    found = frame.found
    found.measure(values, wide)
    found.add("another dtype of scales than the model", np.full((1, 1), stored.dtype != frame.dtype), first)
    if rounding.symmetric:
        middle = np.full(zeros.shape, weight.levels // 2)
        found.add("a zero point of a symmetric weight", zeros != middle, first, zeros, middle)
    steps = np.divide(wide, scales, out=np.zeros_like(wide), where=scales != 0) + points
    off = codes - np.clip(steps, 0, weight.levels - 1)
    others = np.abs(off) > HALF
    if rounding.feedback:
        found.feedback.add(others)
        clipped = ((codes == 0) | (codes == weight.levels - 1)) & (np.abs(codes - steps) <= CLIPPED)
        errors = np.where(clipped, np.clip(codes - steps, -0.5, 0.5), codes - steps)
        problem = beyond_feedback(np.where(scales != 0, errors, 0), size, first) or feedback_problem(blocks, first)
        others = others[:, :1]  # the first column has no error to make up for
    else:
        problem = scale_problem(blocks, first, rounding.plain, weighted=rounding.weighted)
    if problem and not found.problems:
        found.problems.append(f"`{weight.name}`: {problem}")
    found.add("a code that is not the nearest", others, first, values, wide)


CHECKS: dict[type[PackedWeight], Callable[[PackedWeight, Array, int, _Frame], None]] = {
    ScaledWeight: _scaled,
    Float4Weight: _float4,
    Mxfp4Experts: _stacked,
    GroupedWeight: _integers,
}


def global_problem(weight: PackedWeight, peak: np.float32, dtype: np.dtype[Any]) -> str:
    """Describes a global scale that is not 2688 / `peak`, the largest magnitude of all that share it; else empty.

    The reciprocal and the product are rounded to the dtype of the weights, as torch divides a number by a tensor.
    """
    if not isinstance(weight, Float4Weight) or weight.stem + GLOBAL not in weight.parts:
        return ""
    least = np.float32(ml_dtypes.finfo(dtype).tiny)
    with np.errstate(over="ignore"):
        reciprocal = (np.float32(1) / max(peak, least)).astype(dtype).astype(np.float32)
        wanted = (reciprocal * np.float32(2688)).astype(dtype).astype(np.float32)
    wanted = wanted if np.isfinite(wanted) else np.float32(1)
    if weight.whole == wanted:
        return ""
    return f"`{weight.stem}{GLOBAL}` is {weight.whole:.9g}, not {wanted:.9g}"
