"""Weights as the codes and scales of compressed-tensors, computed block of rows by block of rows.

Scales are those of `compressed_tensors` (`quantization/utils/helpers.py`, `calculate_qparams` and `generate_gparam`) of
the extreme values, in the dtype of the weight. Codes are the nearest to the weight divided by its stored scale; the
quotient is float32, as in the package's GPU kernels, for its CPU code rounds that of a bfloat16 weight twice. Exponents
of MXFP4 are those of float32, too: in float16 the package has none below 2^-24, and takes 2^0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import ml_dtypes
import numpy as np

from llmconv.checkpoint import transposed
from llmconv.export.quantization.block_rounding import NONE, BlockFormat
from llmconv.export.quantization.quantized_tensor import (
    BFLOAT16,
    CODES,
    ELEMENTS,
    SCALES,
    ZEROS,
    QuantizedTensor,
    RoundedCodes,
    multiplied,
    require_kept,
    squares_lost,
    widened,
)
from llmconv.quantized_weights.methods.awq import pack_outputs
from llmconv.quantized_weights.methods.mxfp4 import BLOCKS
from llmconv.quantized_weights.methods.mxfp4 import SCALES as EXPONENTS
from llmconv.quantized_weights.packed_weight import float8, pack
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor, as_bytes, in_memory

compiled: ModuleType | None
try:
    import llmconv.compressed._block_codes as compiled
except ImportError:  # llmconv was installed without a C compiler
    compiled = None

Parts = dict[str, LazyTensor]  # the tensors of a weight by the ends of their names, such as `.weight_scale`

WEIGHT, PACKED, SCALE, SHAPE = ".weight", ".weight_packed", ".weight_scale", ".weight_shape"
ZERO_POINT, GLOBAL_SCALE = ".weight_zero_point", ".weight_global_scale"
REACH = {"float8_e4m3fn": np.float32(448), "int8": np.float32(127.5)}
"""A scale is the largest magnitude divided by this: half of the range of codes."""

FLOAT8, UINT8 = BY_NAME["float8_e4m3fn"], BY_NAME["uint8"]


def epsilon(dtype: DType) -> np.float32:
    """The scale of an all-zero row or block: the distance from 1 to the next number of the dtype."""
    return np.float32(ml_dtypes.finfo(dtype.numpy).eps)


def cast_scales(scales: Array, dtype: DType) -> Array:
    """Float32 quotients rounded to the dtype of a weight, as torch divides in it; float32 again."""
    with np.errstate(over="ignore"):
        found: Array = scales.astype(dtype.numpy).astype(np.float32)
    return found


class PerBlock:
    """Codes of 8 bits [N, K], and a scale per `block` of (rows, columns), of which those at the edges may be partial.

    Scales are chosen with the codes and kept until they are written; in any other order the result is the same.
    """

    def __init__(self, name: str, weight: LazyTensor, codes: DType, block: tuple[int, int] | None) -> None:
        self._name, self._weight, self._codes = name, weight, codes
        rows, columns = weight.shape
        self._block = block or (1, columns)
        self._grid_shape = -(-rows // self._block[0]), -(-columns // self._block[1])
        self._lock = threading.Lock()
        self._kept: tuple[Array, Array, Array] | None = None

    def parts(self) -> Parts:
        """`.weight` [N, K], `.weight_scale` in the weight's dtype [N, 1] or one per block."""
        codes = LazyTensor(self._codes, self._weight.shape, self._rows)
        return {WEIGHT: codes, SCALE: LazyTensor(self._weight.dtype, self._grid_shape, self._scales)}

    def _rows(self, start: int, stop: int) -> Array:
        result = np.empty((stop - start, self._weight.shape[1]), self._codes.numpy)
        height = self._block[0]
        step = max(height, ELEMENTS // self._weight.shape[1] // height * height)
        first = start
        while first < stop:
            last = min((first // height + step // height) * height, stop)
            values = self._weight.rows(first, last)
            scales = self._chosen(first, last, values)
            scales = scales[np.arange(first, last) // height - first // height]
            result[first - start : last - start] = encode(values, scales, self._block[1], self._codes)
            first = last
        return result

    def _scales(self, start: int, stop: int) -> Array:
        height = self._block[0]
        scales = self._chosen(start * height, min(stop * height, self._weight.shape[0]), None)
        if stop == self._grid_shape[0]:
            with self._lock:
                if self._kept is not None and self._kept[2].all():
                    require_kept(self._kept[1], self._weight.dtype, self._name)
                self._kept = None
        return scales.astype(self._weight.dtype.numpy)

    def _chosen(self, start: int, stop: int, values: Array | None) -> Array:
        """The scales of the blocks with rows `start:stop`, float32 [blocks, blocks of columns]; chosen once."""
        height, rows = self._block[0], self._weight.shape[0]
        with self._lock:
            if self._kept is None:
                count = self._grid_shape[0]
                self._kept = np.empty(self._grid_shape, np.float32), np.zeros((count, 2)), np.zeros(count, bool)
            grid, squares, known = self._kept
        begin, end = start // height, -(-stop // height)
        at = begin
        while at < end:
            if known[at]:
                at += 1
                continue
            above = at
            while (
                above < end and not known[above] and (above - at + 1) * height * self._weight.shape[1] <= 2 * ELEMENTS
            ):
                above += 1
            above = max(above, at + 1)
            first, last = at * height, min(above * height, rows)
            inside = values is not None and start <= first and last <= stop
            block = (
                values[first - start : last - start]
                if inside and values is not None
                else self._weight.rows(first, last)
            )
            by_row = peaks(block, self._block[1], self._name)
            wanted = np.maximum.reduceat(by_row, np.arange(0, len(block), height), axis=0) / REACH[self._codes.name]
            found = cast_scales(wanted, self._weight.dtype)
            squares[at:above] = squares_lost(wanted, found)
            grid[at:above] = np.where(found == 0, epsilon(self._weight.dtype), found)
            known[at:above] = True
            at = above
        return grid[begin:end]


def encode(rows: Array, scales: Array, width: int, codes: DType) -> Array:
    """Rows divided by the float32 scales of groups of `width` columns, as codes: to nearest even, within the range.

    Of float8_e4m3fn and int8 an array of the shape of the rows; of uint8 pairs of e2m1 [rows, columns/2].
    """
    words = _words(rows)
    shape = (len(rows), rows.shape[1] // 2) if codes == UINT8 else rows.shape
    found = np.empty(shape, codes.numpy)
    if compiled and found.size:
        given = words.dtype.itemsize, rows.shape[1], min(width, rows.shape[1]), KINDS.index(codes.name)
        compiled.codes(as_bytes(words), np.ascontiguousarray(scales), as_bytes(found), *given)
        return found
    spread = scales if scales.shape[1] == 1 else np.repeat(scales, width, axis=1)[:, : rows.shape[1]]
    with np.errstate(over="ignore"):  # where a scale is rounded down to almost nothing
        quotients = widened(rows) / spread
    if codes == UINT8:
        nibbles = float4(np.clip(quotients, -SIX, SIX, out=quotients))
        found[:] = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    elif codes == FLOAT8:
        reach = REACH[codes.name]
        found[:] = float8(np.clip(quotients, -reach, reach, out=quotients)).view(codes.numpy)
    else:
        found[:] = np.rint(np.clip(quotients, -128, 127, out=quotients))
    return found


def peaks(rows: Array, width: int, name: str) -> Array:
    """The largest magnitudes of groups of `width` columns, float32 [rows, groups]; InputRefused if not finite."""
    columns = rows.shape[1]
    found = np.empty((len(rows), -(-columns // width)), np.float32)
    words = _words(rows)
    if compiled and found.size:
        compiled.peaks(as_bytes(words), found, words.dtype.itemsize, columns, min(width, columns))
    else:
        found = np.maximum.reduceat(np.abs(widened(rows)), np.arange(0, columns, width), axis=1)
    if not np.isfinite(found).all():
        widened(rows, name)  # refuses them
    return found


def _words(rows: Array) -> Array:
    """bfloat16 and float32 as they are, others as float32."""
    return np.ascontiguousarray(rows if rows.dtype == BFLOAT16 else widened(rows))


KINDS = ("float8_e4m3fn", "int8", "uint8")
SIX, PRODUCT = np.float32(6), np.float32(2688)  # the largest e2m1; the product of the largest e2m1 and e4m3
ONE = 0x3F800000  # the bits of 1.0 in float32


def float4(values: Array) -> Array:
    """float32 of magnitude up to 6 as e2m1 codes (OCP Microscaling), uint8 of the same shape, to nearest even.

    The sign of a zero is lost, and a negative value that becomes zero keeps its sign, as in compressed-tensors.
    """
    bits = values.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    halves = np.rint(np.abs(values) * np.float32(2)).astype(np.uint32)  # below 1: multiples of one half
    normal = (size + (size >> 22 & 1) + np.uint32(0x1FFFFF) >> 22) - np.uint32(
        126 << 1
    )  # the exponent's bias: 127 to 1
    codes: Array = np.where(size < ONE, halves, normal) | (bits >> 28 & 8) * (size != 0)
    return codes.astype(np.uint8)


@dataclass
class SharedPeak:
    """The largest magnitude of several weights that vLLM joins, float32; found once, when it is first asked for."""

    weights: Sequence[tuple[str, LazyTensor]]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._found: np.float32 | None = None

    def __call__(self) -> np.float32:
        with self._lock:
            if self._found is None:
                self._found = max(largest(name, weight) for name, weight in self.weights)
            return self._found


def largest(name: str, weight: LazyTensor) -> np.float32:
    """The largest magnitude in a weight, which must be finite."""
    blocks = weight.blocks(ELEMENTS * weight.dtype.itemsize)
    return np.float32(max(peaks(weight.rows(*block), weight.shape[1], name).max() for block in blocks))


class Float4:
    """Codes e2m1 in pairs, uint8 [N, K/2], and a scale per group of columns [N, K/size]."""

    def __init__(self, name: str, weight: LazyTensor, size: int) -> None:
        self._name, self._weight, self._size = name, weight, size

    def _packed(self, effective: Callable[[Array], Array], start: int, stop: int) -> Array:
        """Codes of rows, whose `effective` scales [rows, groups] are a function of the largest magnitudes."""
        rows, columns = self._weight.shape
        result = np.empty((stop - start, columns // 2), np.uint8)
        step = max(1, ELEMENTS // columns)
        for first in range(start, stop, step):
            values = self._weight.rows(first, min(first + step, stop))
            scales = effective(peaks(values, self._size, self._name))
            result[first - start :][:step] = encode(values, scales, self._size, UINT8)
        return result

    def _made(self, scale: Callable[[Array], Array], effective: Callable[[Array], Array], dtype: DType) -> Parts:
        rows, columns = self._weight.shape

        def scales(start: int, stop: int) -> Array:
            blocks = (self._weight.rows(at, min(at + step, stop)) for at in range(start, stop, step))
            found = [scale(peaks(values, self._size, self._name)) for values in blocks]
            return np.concatenate(found).astype(dtype.numpy, copy=False)

        step = max(1, ELEMENTS // columns)
        packed = LazyTensor(UINT8, (rows, columns // 2), partial(self._packed, effective))
        return {PACKED: packed, SCALE: LazyTensor(dtype, (rows, columns // self._size), scales)}


class NvFloat4(Float4):
    """NVFP4: scales e4m3 per 16 columns, and one float32 `weight_global_scale` by which they are multiplied."""

    def __init__(self, name: str, weight: LazyTensor, peak: SharedPeak) -> None:
        super().__init__(name, weight, 16)
        self._peak = peak

    def parts(self) -> Parts:
        """`.weight_packed`, `.weight_scale` float8_e4m3fn, `.weight_global_scale` float32 [1]."""
        made = self._made(self._scale, lambda largest: self._scale(largest).astype(np.float32) / self._global(), FLOAT8)
        whole = LazyTensor(
            BY_NAME["float32"], (1,), lambda start, stop: np.full(1, self._global(), np.float32)[start:stop]
        )
        return {**made, GLOBAL_SCALE: whole}

    def _global(self) -> np.float32:
        """2688 times the reciprocal of the largest magnitude, each in the weight's dtype; 1 where that is infinite."""
        dtype = self._weight.dtype
        least = np.float32(ml_dtypes.finfo(dtype.numpy).tiny)
        with np.errstate(over="ignore"):
            reciprocal = cast_scales(np.array([1 / max(self._peak(), least)], np.float32), dtype)
            found = cast_scales(reciprocal * PRODUCT, dtype)[0]
        return np.float32(found) if np.isfinite(found) else np.float32(1)

    def _scale(self, largest: Array) -> Array:
        local = cast_scales(largest / SIX, self._weight.dtype)
        scales = np.minimum(local * self._global(), REACH[FLOAT8.name])
        return float8(np.where(scales < LEAST_HALF, np.float32(0.125), scales)).view(FLOAT8.numpy)


LEAST_HALF = np.nextafter(np.float32(2**-10), np.float32(1))
"""Smaller scales round to zero in e4m3 (a tie goes to even); compressed-tensors then takes an eighth."""


class MxFloat4(Float4):
    """MXFP4: scales are exponents of two (e8m0, biased by 127), uint8, per 32 columns."""

    def __init__(self, name: str, weight: LazyTensor) -> None:
        super().__init__(name, weight, 32)

    def parts(self) -> Parts:
        """`.weight_packed`, `.weight_scale` uint8."""
        return self._made(self._exponents, self._powers, UINT8)

    def _powers(self, largest: Array) -> Array:
        return np.ldexp(np.float32(1), self._exponents(largest).astype(np.int32) - 127)

    def _exponents(self, largest: Array) -> Array:
        """The exponent of the largest magnitude, one more from 1.75 times its power of two on, less that of 4."""
        bits = largest.view(np.uint32).astype(np.int64)
        found: Array = np.maximum((bits + (1 << 21) >> 23) - 2, 0)
        return found.astype(np.uint8)


def stacked_floats(name: str, stack: LazyTensor) -> Parts:
    """MXFP4 of a stack of matrices [experts, K, N] as gpt-oss is released; codes and exponents are those of `MxFloat4`.

    `_blocks` uint8 [experts, N, K/32, 16], `_scales` uint8 [experts, N, K/32]; one expert at a time is in memory.
    """
    experts, columns, rows = stack.shape

    def part(end: str, shape: tuple[int, ...]) -> LazyTensor:
        def read(start: int, stop: int) -> Array:
            found = np.empty((stop - start, *shape), np.uint8)
            for at in range(start, stop):
                matrix = np.ascontiguousarray(stack.rows(at, at + 1)[0].T)
                parts = MxFloat4(name, in_memory(matrix, stack.dtype)).parts()
                found[at - start] = parts[end].read().reshape(shape)
            return found

        return LazyTensor(UINT8, (experts, *shape), read)

    groups = columns // 32
    return {BLOCKS: part(PACKED, (rows, groups, 16)), EXPONENTS: part(SCALE, (rows, groups))}


@dataclass(frozen=True)
class Measured:
    """What a text tells of a matrix [N, K] (`calibrated.py`); nothing without one."""

    importance: Array = field(default_factory=lambda: NONE)  # of its columns, float32 [K]; empty if all count alike
    # powers of two that are multiplied with its columns [K] and its rows [N, 1] first; empty for none
    factors: Array = field(default_factory=lambda: NONE)
    outputs: Array = field(default_factory=lambda: NONE)
    rounded: RoundedCodes | None = None  # codes with error feedback, which are taken as they are


def integers(name: str, weight: LazyTensor, form: BlockFormat, measured: Measured) -> Mapping[str, LazyTensor]:
    """Codes uint8 [N, groups, size/2], zero points unless symmetric, scales [N, groups] in the weight's dtype.

    They are those that `export --quant` chooses, by the ends of their names; K is a multiple of the size.
    """
    if measured.rounded:
        made = measured.rounded.tensors(name)
    else:
        importance, given = measured.importance, weight
        if measured.outputs.size:
            given = multiplied(given, measured.outputs)
        if measured.factors.size:
            given = multiplied(given, measured.factors)
            importance = importance / measured.factors**2 if importance.size else NONE
        made = QuantizedTensor(name, given, form, scale_dtype=weight.dtype, importance=importance).tensors()
    return {end: made[name + end] for end in (CODES, ZEROS, SCALES) if name + end in made}


def packed_integers(name: str, weight: LazyTensor, form: BlockFormat, measured: Measured) -> Parts:
    """Integers of 4 bits in groups, in int32 words, as compressed-tensors packs them.

    `.weight_packed` [N, K/8], `.weight_zero_point` [N/8, groups] unless symmetric, `.weight_scale` [N, groups] in the
    weight's dtype, `.weight_shape` int64 [2].
    """
    (rows, columns), made = weight.shape, integers(name, weight, form, measured)
    codes, words = made[CODES], BY_NAME["int32"]

    def packed(start: int, stop: int) -> Array:
        return codes.rows(start, stop).reshape(stop - start, -1).view(words.numpy)

    parts = {PACKED: LazyTensor(words, (rows, columns // 8), packed)}
    if not form.symmetric:

        def points(start: int, stop: int) -> Array:
            found = zero_points(made[ZEROS], start * 8, min(stop * 8, rows), columns // form.size)
            return np.ascontiguousarray(pack(np.ascontiguousarray(found.T), 4, stop - start).T)

        parts[ZERO_POINT] = LazyTensor(words, (-(-rows // 8), columns // form.size), points)
    return {**parts, SCALE: made[SCALES], SHAPE: in_memory(np.array(weight.shape, np.int64), BY_NAME["int64"])}


def zero_points(pairs: LazyTensor, start: int, stop: int, groups: int) -> Array:
    """Zero points uint8 [rows, groups] of rows `start:stop`, which are stored in pairs."""
    found = pairs.rows(start, stop)
    return np.stack([found & 15, found >> 4], axis=-1).reshape(len(found), -1)[:, :groups]


# The layouts of AutoAWQ (`gemm`) and GPTQ have the outputs of a matrix in columns: words [K, N/8] and [K/8, N].
QWEIGHT, QZEROS, QSCALES, G_IDX = ".qweight", ".qzeros", ".scales", ".g_idx"


def awq_integers(name: str, weight: LazyTensor, form: BlockFormat, measured: Measured) -> Parts:
    """Integers of 4 bits in groups as AutoAWQ's `gemm` packs them; symmetric ones with zero points of 8.

    `.qweight` int32 [K, N/8], `.qzeros` int32 [groups, N/8], `.scales` [groups, N] in the weight's dtype.
    """
    (rows, columns), made = weight.shape, integers(name, weight, form, measured)
    groups = columns // form.size

    def words(start: int, stop: int) -> Array:
        pairs = made[CODES].rows(start * 8, stop * 8).reshape(-1, columns // 2)
        return pack_outputs(np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1, columns))

    def points(start: int, stop: int) -> Array:
        if form.symmetric:
            return pack_outputs(np.full(((stop - start) * 8, groups), form.middle, np.uint8))
        return pack_outputs(zero_points(made[ZEROS], start * 8, stop * 8, groups))

    codes, zeros = (
        LazyTensor(BY_NAME["int32"], (rows // 8, size), read) for size, read in ((columns, words), (groups, points))
    )
    return {QWEIGHT: transposed(codes), QZEROS: transposed(zeros), QSCALES: transposed(made[SCALES])}


def gptq_integers(name: str, weight: LazyTensor, form: BlockFormat, measured: Measured) -> Parts:
    """Symmetric integers of 4 bits in groups as AutoGPTQ packs them (`checkpoint_format: gptq`), columns in order.

    `.qweight` int32 [K/8, N], `.qzeros` int32 [groups, N/8] with 7 for zero points of 8, as the format stores one less,
    `.scales` [groups, N] in the weight's dtype, `.g_idx` int32 [K].
    """
    (rows, columns), made = weight.shape, integers(name, weight, form, measured)
    groups, int32 = columns // form.size, BY_NAME["int32"]

    def words(start: int, stop: int) -> Array:
        return made[CODES].rows(start, stop).reshape(stop - start, -1).view(int32.numpy)

    sevens = np.full((groups, rows // 8), 0x77777777, np.int32)
    order = np.arange(columns, dtype=np.int32) // form.size
    return {
        QWEIGHT: transposed(LazyTensor(int32, (rows, columns // 8), words)),
        QZEROS: in_memory(sevens, int32),
        QSCALES: transposed(made[SCALES]),
        G_IDX: in_memory(order, int32),
    }
