"""How rows of a matrix are stored as integer codes in blocks (`BlockFormat`) or columns, and how they are rounded.

The scales and zero points have the least squared error. Without a search the results are those of onnxruntime's
`MatMulNBitsQuantizer`, bit for bit: symmetric scales come from the extreme value, others from the
range, and ties are rounded away from zero. With a search, several ranges and zero
points are tried; for each, the scale is the least-squares fit to the codes. Errors of a column count in proportion to
its importance, the mean square of the activations that it is multiplied with. All arithmetic is float32, in a fixed
order, so that the compiled code and numpy make the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from llmconv.tensors import Array

BITS = (4, 8)
SIZES = (16, 32, 64, 128, 256)  # block sizes of onnxruntime's CPU kernel (contrib_ops/cpu/quantization/matmul_nbits.cc)


@dataclass(frozen=True)
class BlockFormat:
    """The layout of `com.microsoft.MatMulNBits`: a weight is `(code - zero point) * scale`."""

    bits: int = 4  # of a code, 4 or 8
    size: int = 32  # number of neighboring columns that share a scale; the last block of a row is padded with zeros
    symmetric: bool = False  # the zero point is the middle code, and not stored
    # choose scale and zero point with the least squared error; otherwise from the extreme values alone
    search: bool = True

    @property
    def largest(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def block_bytes(self) -> int:
        return self.size * self.bits // 8

    def blocks(self, columns: int) -> int:
        return -(-columns // self.size)

    def zero_bytes(self, columns: int) -> int:
        return -(-self.blocks(columns) * self.bits // 8)


LARGEST = 127  # the largest code; the smallest is its negative


@dataclass(frozen=True)
class ColumnFormat:
    """The layout of `com.microsoft.DynamicQuantizeMatMul`: a weight is `code * scale`, all in float32.

    The other factor is rounded to uint8 at run time, with one scale for the whole tensor. `size` is the least number of
    rows K.
    """

    bits: int = 8
    size: int = 1


WeightFormat = BlockFormat | ColumnFormat  # how a weight is stored


compiled: ModuleType | None
try:
    from llmconv.export.quantization import _block_rounding as compiled
except ImportError:  # llmconv was installed without a C compiler
    compiled = None

NONE = np.empty(0, np.float32)
HALF = np.float32(0.49999997)  # the largest float below one half: added and truncated, ties go away from zero
TINY = np.float32(1e-30)  # A smaller range of values counts as zero
COARSE = 6  # ranges that are tried first; then those around the best


def block_scales(weights: Array, form: BlockFormat, importance: Array = NONE) -> tuple[Array, Array]:
    """Scales float32 [blocks] and zero points uint8 [blocks] of finite weights float32 [blocks, form.size].

    `importance` is float32 of the columns of a row, repeated for every row; empty if all count alike.
    """
    scales, zeros = np.empty(len(weights), np.float32), np.empty(len(weights), np.uint8)
    if compiled and len(weights):
        options = form.size, form.bits, form.symmetric, form.search
        compiled.scales(np.ascontiguousarray(weights), importance, scales, zeros, *options)
        return scales, zeros
    with np.errstate(all="ignore"):
        return _Search(weights, form, importance).run() if len(weights) else (scales, zeros)


def block_codes(weights: Array, scales: Array, zeros: Array, form: BlockFormat) -> Array:
    """Codes uint8 [blocks, form.block_bytes], the first of two in the low bits, of weights float32 [blocks, form.size].

    Scales are float32 [blocks], zeros uint8 [blocks].
    """
    packed = np.empty((len(weights), form.block_bytes), np.uint8)
    if compiled and len(weights):
        compiled.codes(np.ascontiguousarray(weights), scales, zeros, packed, form.size, form.bits)
        return packed
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    whole = _rounded(weights * inverse[:, None] + zeros[:, None].astype(np.float32), form).astype(np.uint8)
    return pack(whole, form.bits)


def block_values(weights: Array, scales: Array, zeros: Array, form: BlockFormat) -> Array:
    """The values float32 [blocks, form.size] that the codes of weights stand for; arguments as for `block_codes`."""
    packed = block_codes(weights, scales, zeros, form)
    codes = packed if form.bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1)
    steps = codes.reshape(len(weights), -1)[:, : form.size].astype(np.float32) - zeros[:, None]
    return steps * scales[:, None]


def pack(codes: Array, bits: int) -> Array:
    """Codes uint8 [rows, n] as bytes [rows, ceil(n * bits / 8)], the first in the low bits."""
    if bits == 8:
        return codes
    even = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    packed: Array = even[:, 0::2] | even[:, 1::2] << 4
    return packed


def _rounded(values: Array, form: BlockFormat) -> Array:
    """Values float32 rounded to codes, ties away from zero, as float32."""
    inside = np.minimum(np.maximum(values, np.float32(0)), np.float32(form.largest))
    return np.trunc(inside + HALF)


class _Search:
    """The search over all blocks at once, in numpy; arguments as in `block_scales`."""

    def __init__(self, weights: Array, form: BlockFormat, importance: Array) -> None:
        self._weights, self._form = weights, form
        self._factors = np.ones((1, form.size), np.float32)
        if importance.size:
            rows = len(weights) * form.size // importance.size
            self._factors = np.tile(importance.reshape(-1, form.size), (rows, 1))
        low, high = np.minimum(weights.min(1), 0), np.maximum(weights.max(1), 0)
        self._low = low
        self._range = np.where(high > -low, high, low) if form.symmetric else high - low
        width = np.float32(-form.middle if form.symmetric else form.largest)
        self._scale = self._range / width
        self._zero = self._nearest_zero(-low / self._scale)
        self._gain, self._width = np.zeros_like(low), np.full_like(low, width)

    def run(self) -> tuple[Array, Array]:
        if self._form.search:
            self._try_all()
        empty = np.abs(self._range) < TINY
        zeros = np.where(empty, np.float32(self._form.middle), self._zero)
        return np.where(empty, np.float32(0), self._scale), zeros.astype(np.uint8)

    def _nearest_zero(self, values: Array) -> Array:
        if self._form.symmetric:
            return np.full_like(values, np.float32(self._form.middle))
        return _rounded(values, self._form)

    def _try_all(self) -> None:
        form = self._form
        first = np.float32(-(np.float32(form.middle) - np.float32(1.6)) if form.symmetric else form.largest - 1)
        step = np.float32(-0.4 if form.symmetric else 0.35)
        for turn in range(COARSE):
            width = np.full_like(self._low, first + step * np.float32(turn))
            self._attempt(width, self._nearest_zero(-self._low * (width / self._range)))
        center, known = self._width, self._zero
        for turn in (-1, 0, 1):
            for shift in (-1, 0, 1):
                if (turn or shift) and not (form.symmetric and shift):
                    zero = np.clip(known + np.float32(shift), 0, np.float32(form.largest))
                    self._attempt(center + step * np.float32(0.5) * np.float32(turn), zero)

    def _attempt(self, width: Array, zero: Array) -> None:
        """Keeps the scale range/width with this zero point where less is lost."""
        inverse = width / self._range
        products, squares = np.zeros_like(width), np.zeros_like(width)
        for at in range(self._form.size):
            weight, factor = self._weights[:, at], self._factors[:, at]
            code = _rounded(weight * inverse + zero, self._form) - zero
            scaled = factor * code
            products += scaled * weight
            squares += scaled * code
        fitted = products / squares
        gain = fitted * products
        better = (squares > 0) & (gain > self._gain) & (gain < np.inf)
        self._gain, self._scale = np.where(better, gain, self._gain), np.where(better, fitted, self._scale)
        self._zero, self._width = np.where(better, zero, self._zero), np.where(better, width, self._width)
