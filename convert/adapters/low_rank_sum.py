"""W' = W + Σ sᵢ·Bᵢ·Aᵢ: the one place that adds low-rank products to a weight; rounding to narrow types.

Shapes: W out×in, A r×in, B out×r (or the transpose of their product, for weights stored in×out). Products and sums are
computed in float64, by blocks of rows, and rounded once (nearest even) to the result's type.

Conversion between float32 and narrower types works on the bits, which is faster than numpy's casts: `ml_dtypes` casts
bfloat16 inside the interpreter lock; numpy casts float16 at a third of this speed, and subnormal numbers at a fortieth.
A float16 moved into the bits of a float32 is that number times 2⁻¹¹², subnormal ones too. Back, float32 rounds: added
to a number whose last bit is that of the float16, a value is rounded to nearest even.

OpenBLAS, which numpy brings, is restricted to the calling thread: its threads wait in busy loops, for small matrices
half of the CPU time where nothing else runs, and several times what they save if other processes run (measured).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from types import ModuleType

import ml_dtypes
import numpy as np

from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array, DType, LazyTensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

TILE = 1 << 15  # elements at once, so that all passes over them stay in the core's cache
SHIFT, EXPONENT, SIGN = 13, np.uint32(0x7F800000), np.uint32(0x8000)
UP, DOWN = np.float32(2.0**112), np.float32(2.0**-112)
# The exponent of the smallest normal float16, whose last bit is that of the subnormal ones
SMALLEST = np.uint32((127 - 14) << 23)
OVERFLOW, INFINITY = np.float32(65520), 0x7C00  # the first float32 that is rounded to infinity; the bits of that


def round_into(target: Array, values: Array) -> None:
    """target = values, rounded as torch does: to float32, and from there to narrower types, to nearest even.

    `target` is float64, float32, float16 or bfloat16, C-contiguous; `values` are float32 or float64, of the same shape.
    Raises UnsupportedInput if a finite value is too large for `target`.
    """
    try:
        with np.errstate(over="raise"):
            narrow = values.astype(np.float32, copy=False) if target.dtype.itemsize < 4 else values
            if target.dtype == BFLOAT16:
                _round_to_bfloat16(target, narrow)
            elif target.dtype != np.float16 or not round_to_float16(target, narrow):
                target[...] = narrow
    except FloatingPointError as error:
        hint = "give a smaller `--weight`, or check the adapter's alpha"
        hint = "give `--dtype bfloat16` or `--dtype float32`" if target.dtype.name == "float16" else hint
        raise UnsupportedInput(f"a merged weight is too large for {target.dtype.name}", hint=hint) from error


def _round_to_bfloat16(target: Array, values: Array) -> None:
    if np.isnan(values.max(initial=0)):
        target[...] = values
        return
    bits = values.view(np.uint32)
    work = bits >> 16
    work &= 1
    work += 0x7FFF
    work += bits
    work >>= 16
    target.view(np.uint16)[...] = work


def widen(values: Array) -> Array:
    """The same values, of any floating-point type, in float32; float32 and float64 as they are."""
    if values.dtype == BFLOAT16:  # the upper half of float32
        bits = values.view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if values.dtype == np.float16 and values.flags.c_contiguous:
        # C-contiguous float16 `values` in float32
        result = np.empty(values.shape, np.float32)
        source, target = values.reshape(-1).view(np.int16), result.reshape(-1)
        for start in range(0, len(source), TILE):
            tile, halves = target[start : start + TILE], source[start : start + TILE]
            if not _has_subnormals() or (halves & INFINITY).max() == INFINITY:
                return values.astype(np.float32)
            moved = tile.view(np.int32)
            moved[...] = halves
            moved <<= SHIFT
            moved &= ~0x70000000  # the copies of the sign
            tile *= UP
        return result
    return values if values.dtype.itemsize >= 4 else values.astype(np.float32)


def round_to_float16(target: Array, values: Array) -> bool:
    """Rounds float32 `values` into `target`; False, with an undefined result, for large values, infinities and NaN."""
    source, result = values.reshape(-1), target.reshape(-1).view(np.uint16)
    for start in range(0, len(source), TILE):
        tile = source[start : start + TILE]
        size = np.abs(tile)
        if not size.max() < OVERFLOW or not _has_subnormals():
            return False
        bits = tile.view(np.uint32)
        high = bits & EXPONENT
        np.maximum(high, SMALLEST, out=high)
        high += np.uint32(SHIFT << 23)
        size += high.view(np.float32)
        size -= high.view(np.float32)
        size *= DOWN
        pattern = size.view(np.uint32)
        pattern >>= SHIFT
        np.right_shift(bits, 16, out=high)
        high &= SIGN
        pattern |= high
        result[start : start + TILE] = pattern
    return True


def _has_subnormals() -> bool:
    """Whether this thread computes with them; a library may have switched that off for speed."""
    small = np.full(1, 2.0**-24, np.float32) * DOWN
    return bool((small * UP)[0] == 2.0**-24)


MAPS = Path("/proc/self/maps")
# How builds of OpenBLAS call `openblas_get_num_threads` and `openblas_set_num_threads` (cblas.h)
NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")
Counter = tuple[Callable[[], int], Callable[[int], None]]


def _thread_counters() -> list[Counter]:
    """Functions that get and set the number of threads of each OpenBLAS in this process; empty where none is found."""
    if not MAPS.is_file():
        return []
    paths = {Path(line.split(maxsplit=5)[-1]) for line in MAPS.read_text().splitlines()}
    found = []
    for library in sorted(path for path in paths if "openblas" in path.name and ".so" in path.name):
        with suppress(OSError):  # a file that only has such a name
            opened = ctypes.CDLL(str(library))
            names = [name for name in NAMES if hasattr(opened, name.format("set"))]
            found += [(getattr(opened, name.format("get")), getattr(opened, name.format("set"))) for name in names[:1]]
    return found


COUNTERS = _thread_counters()  # looked up once, before any input is there: while one is read nothing else is opened


_lock = Lock()
_before: list[list[int]] = []
"""One entry for each `single_threaded` that is open; the first has the numbers from before."""


@contextmanager
def single_threaded() -> Iterator[None]:
    """Inside, OpenBLAS makes every product with the calling thread alone; for all threads of the process."""
    with _lock:
        _before.append([get() for get, _ in COUNTERS] if not _before else _before[0])
        _set([1] * len(COUNTERS))
    try:
        yield
    finally:
        with _lock:
            counts = _before.pop()
            if not _before:
                _set(counts)


def _set(counts: list[int]) -> None:
    for (_, put), count in zip(COUNTERS, counts, strict=True):
        put(count)


compiled: ModuleType | None
try:
    from llmconv.convert.adapters import _low_rank_sum as compiled
except ImportError:  # llmconv was installed without a C compiler
    compiled = None

TILE_ELEMENTS = 1 << 18  # elements summed at once: two megabytes in float64, which fit into a core's cache
ROWS = 8
PRODUCT_LIMIT = 1 << 18
"""Largest rows·r·columns of one product. OpenBLAS divides larger ones among its own threads (`interface/gemm.c`), which
compete with the writer's threads: five times slower, measured."""


@dataclass(frozen=True)
class LoraProduct:
    """One adapter's update of a weight, `scale · b · a` (b out×r, a r×in), or its transpose for weights in×out."""

    a: LazyTensor
    b: LazyTensor
    scale: float
    transposed: bool = False

    def factors(self, start: int, stop: int) -> tuple[Array, Array]:
        """Two float64 matrices (rows×r, r×columns) whose product is rows `start:stop` of the update."""
        if self.transposed:
            left, right = self.a.read()[:, start:stop].T, self.b.read().T
        else:
            left, right = self.b.rows(start, stop), self.a.read()
        return left.astype(np.float64) * self.scale, right.astype(np.float64)

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        return thin_product(*self.factors(start, stop))


def is_mirrored(one: object, other: object) -> bool:
    """Whether two updates are equal: of the same factors, or of transposed ones (an embedding and its tied head)."""
    if not isinstance(one, LoraProduct) or not isinstance(other, LoraProduct) or one.scale != other.scale:
        return False
    if one.transposed == other.transposed:
        pairs = [(one.a.read(), other.a.read()), (one.b.read(), other.b.read())]
    else:
        pairs = [(one.a.read(), other.b.read().T), (one.b.read(), other.a.read().T)]
    return all(np.array_equal(mine, others) for mine, others in pairs)


def add_products(base: LazyTensor, products: Sequence[LoraProduct], dtype: DType | None = None) -> LazyTensor:
    """The lazy tensor W + Σ s·B·A, every element summed in float64 and rounded once to `dtype` (default: of `base`).

    The rounding is that of torch and `ml_dtypes`: to float32, and from there to narrower types, to nearest even. The
    result does not depend on the number of threads or the division into rows. `base` is two-dimensional, or a bias,
    which counts as one column. Reading rows raises UnsupportedInput for a sum too large for `dtype`.
    """
    kind = dtype or base.dtype

    def load(start: int, stop: int) -> Array:
        return add_products_to_rows(base.rows(start, stop), [each.factors(start, stop) for each in products], kind)

    return LazyTensor(kind, base.shape, load, lambda other: add_products(base, products, other))


def add_products_to_rows(rows: Array, pairs: Sequence[tuple[Array, Array]], dtype: DType) -> Array:
    """rows + Σ left [rows, r] @ right [r, all other dims], float64, rounded once to `dtype`; see `add_products`."""
    left, right = np.hstack([pair[0] for pair in pairs]), np.vstack([pair[1] for pair in pairs])
    result = np.empty(rows.shape, dtype.numpy)
    columns = prod(rows.shape[1:])
    source, target = rows.reshape(-1, columns), result.reshape(-1, columns)
    if not add_in_one_pass(target, source, left, right):
        add_by_tiles(target, source, left, right)
    return result


def add_in_one_pass(target: Array, source: Array, left: Array, right: Array) -> bool:
    """target = source + left @ right by the compiled code, for finite sums in bfloat16; returns whether it was done."""
    if not compiled or not source.size or not (source.dtype == target.dtype == BFLOAT16):
        return False
    bits, left, right = (np.ascontiguousarray(each) for each in (source.view(np.uint16), left, right))
    return bool(compiled.add(target.view(np.uint16), bits, left, right, left.shape[1]))


def add_by_tiles(target: Array, source: Array, left: Array, right: Array) -> None:
    """target [rows, in] = source [rows, in] + left [rows, r] @ right [r, in], factors float64; any float types."""
    height = max(1, TILE_ELEMENTS // source.shape[1] // ROWS) * ROWS
    for first in range(0, len(source), height):
        tile = slice(first, min(first + height, len(source)))
        total = thin_product(left[tile], right)
        total += widen(source[tile])
        round_into(target[tile], total)


def thin_product(left: Array, right: Array) -> Array:
    """left (rows×r) @ right (r×columns) in float64, in parts up to `PRODUCT_LIMIT`, by the calling thread alone."""
    rank, columns = right.shape
    if not rank:  # a module that AdaLoRA pruned away
        return np.zeros((len(left), columns))
    product = np.empty((len(left), columns))
    width = max(64, PRODUCT_LIMIT // (ROWS * rank))
    whole = len(left) // ROWS * ROWS
    for rows in (slice(0, whole), slice(whole, len(left))):
        parts = left[rows].reshape(-1, min(ROWS, max(1, rows.stop - rows.start)), rank)
        target = product[rows].reshape(*parts.shape[:2], columns)
        for first in range(0, columns, width) if parts.size else ():
            part = slice(first, first + width)
            np.matmul(parts, right[:, part], out=target[:, :, part])
    return product
