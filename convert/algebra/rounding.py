"""Bitwise conversion between float32 and narrower floating-point types, to nearest even: faster than numpy's casts.

`ml_dtypes` casts bfloat16 inside the interpreter lock; numpy casts float16 at a third of this speed, and subnormal
numbers at a fortieth. A float16 moved into the bits of a float32 is that number times 2⁻¹¹², subnormal ones too. Back,
float32 rounds: added to a number whose last bit is that of the float16, a value is rounded to nearest even.

Restricts OpenBLAS, which numpy brings, to the calling thread.

Its threads wait in busy loops: for small matrices half of the CPU time where nothing else runs, and several times what
they save if other processes run (measured).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

import ml_dtypes
import numpy as np

from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

TILE = 1 << 15  # elements at once, so that all passes over them stay in the core's cache
SHIFT, EXPONENT, SIGN = 13, np.uint32(0x7F800000), np.uint32(0x8000)
UP, DOWN = np.float32(2.0**112), np.float32(2.0**-112)
SMALLEST = np.uint32((127 - 14) << 23)
"""The exponent of the smallest normal float16, whose last bit is that of the subnormal ones."""

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
        too_large = target.dtype.name == "float16"
        raise UnsupportedInput(
            f"a merged weight is too large for {target.dtype.name}",
            hint="give `--dtype bfloat16` or `--dtype float32`"
            if too_large
            else "give a smaller `--weight`, or check the adapter's alpha",
        ) from error


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
        wide: Array = bits.view(np.float32)
        return wide
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
NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")
"""How builds of OpenBLAS call `openblas_get_num_threads` and `openblas_set_num_threads` (cblas.h)."""

Counter = tuple[Callable[[], int], Callable[[int], None]]


def _thread_counters() -> list[Counter]:
    """Functions that get and set the number of threads of each OpenBLAS in this process; empty where none is found."""
    if not MAPS.is_file():
        return []
    paths = {Path(line.split(maxsplit=5)[-1]) for line in MAPS.read_text().splitlines()}
    libraries = sorted(path for path in paths if "openblas" in path.name and ".so" in path.name)
    found = []
    for library in libraries:
        with suppress(OSError):  # a file that only has such a name
            found += _counters_of(ctypes.CDLL(str(library)))
    return found


def _counters_of(library: ctypes.CDLL) -> list[Counter]:
    names = [name for name in NAMES if hasattr(library, name.format("set"))]
    return [(getattr(library, name.format("get")), getattr(library, name.format("set"))) for name in names[:1]]


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
