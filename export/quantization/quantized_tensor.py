"""The tensors that a file stores for a quantized weight: codes, scales, zero points, and factors of columns.

Scales are written in the file's type so that none overflows, and a matrix of small weights does not vanish.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from llmconv.checkpoint import transposed
from llmconv.errors import InputRefused
from llmconv.export.quantization.block_rounding import (
    LARGEST,
    NONE,
    BlockFormat,
    block_codes,
    block_scales,
    block_values,
    pack,
)
from llmconv.output.plan import failing_safely
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor, in_memory

MOST_LOST = 1 / 16
"""Root mean square of what rounding takes from the scales of a matrix, relative to theirs; float16 takes 1/5000."""

WIDER = {"float16": "give `--precision bfloat16` or float32", "bfloat16": "give `--precision float32`"}
"""Hints by the type that is too narrow."""


def stored_scales(scales: Array, dtype: DType, name: str, *, kept: bool = False) -> Array:
    """Float32 scales of the weight `name`, cast to `dtype`.

    Of a checkpoint's own scales (`kept`) an error does not suggest `--quant-exclude`. Raises InputRefused: a scale is
    too large for the type.
    """
    with np.errstate(over="ignore"):
        stored: Array = scales.astype(dtype.numpy)
    if not np.isfinite(stored.astype(np.float32)).all():
        wider = bool(np.isfinite(scales).all())
        raise InputRefused(f"a scale of `{name}` is too large for {dtype.name}", hint=_hint(dtype, wider, kept))
    return stored


def squares_lost(wanted: Array, stored: Array) -> Array:
    """Float64 [rows, 2]: squares of what rounding takes from scales [rows, ...], and of the scales, summed by row.

    `wanted` is float32, `stored` the same scales in another type, finite.
    """
    wide = wanted.astype(np.float64).reshape(len(wanted), -1)
    lost = wide - stored.astype(np.float64).reshape(wide.shape)
    return np.stack([np.sum(lost**2, axis=1), np.sum(wide**2, axis=1)], axis=1)


def require_kept(squares: Array, dtype: DType, name: str, *, kept: bool = False) -> None:
    """Refuses a matrix whose scales the type does not hold; a few small blocks among larger ones may vanish.

    `squares` are those of `squares_lost`, of all rows. Raises InputRefused: most scales are too small for the type.
    """
    lost, total = squares.sum(axis=0)
    if lost > MOST_LOST**2 * total:
        raise InputRefused(f"the scales of `{name}` are too small for {dtype.name}", hint=_hint(dtype, True, kept))


def _hint(dtype: DType, wider: bool, kept: bool) -> str:
    """What helps: a wider type, if one holds the scales, or floats, if the weights are not codes already."""
    wide = WIDER.get(dtype.name) if wider else None
    plain = None if kept else "leave the weight as it is: `--quant-exclude`"
    return ", or ".join(filter(None, (wide, plain))) or "take the model it was quantized from"


# suffixes of the tensors' names
CODES, SCALES, ZEROS, ORDER, OFFSETS = ".codes", ".scales", ".zeros", ".order", ".offsets"
ELEMENTS = 1 << 19  # weights that are rounded at once: 2 MB in float32, which fit into a core's cache
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BYTES = BY_NAME["uint8"]


def byte_shapes(outer: tuple[int, ...], columns: int, form: BlockFormat) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shapes of codes, and of zero points unless symmetric, by suffix, of matrices [*outer, columns]."""
    yield CODES, (*outer, form.blocks(columns), form.block_bytes)
    if not form.symmetric:
        yield ZEROS, (*outer, form.zero_bytes(columns))


class QuantizedTensor:
    """A weight whose matrices [N, K] are stored in a `BlockFormat`.

    Scales are chosen with the codes and kept until they are written, so that nothing is searched twice when a file has
    codes, zero points and scales in this order; in any other order the result is the same.
    """

    def __init__(
        self,
        name: str,
        weight: LazyTensor,  # [N, K], or a stack [experts, N, K]
        form: BlockFormat,
        *,
        transposed: bool = False,  # its matrices are stored as [K, N]
        scale_dtype: DType = BY_NAME["float32"],  # of the scales, to which they are rounded before the codes are
        importance: Array = NONE,  # float32 [K], or [experts, K] for a stack; empty if all columns count alike
    ) -> None:
        self._name, self._weight, self.form = name, weight, form
        self.transposed, self._scale_dtype = transposed, scale_dtype
        *stack, rows, columns = weight.shape
        if transposed:
            rows, columns = columns, rows
        self._outer, self._columns = (*stack, rows), columns
        padding = -importance.shape[-1] % form.size
        self._importance = np.pad(importance, [(0, 0)] * (importance.ndim - 1) + [(0, padding)])
        self._kept: tuple[Array, Array, Array, Array] | None = None
        self._lock = threading.Lock()

    def tensors(self) -> dict[str, LazyTensor]:
        """Codes uint8 [N, blocks, bytes], zero points uint8 [N, bytes] unless symmetric, scales [N, blocks]; by name.

        A stack has the axis of its experts in front.
        """
        readers = {CODES: self._codes, ZEROS: self._zeros}
        shapes = byte_shapes(self._outer, self._columns, self.form)
        made = {self._name + suffix: LazyTensor(BYTES, shape, readers[suffix]) for suffix, shape in shapes}
        scales = (*self._outer, self.form.blocks(self._columns))
        return {**made, self._name + SCALES: LazyTensor(self._scale_dtype, scales, self._scales)}

    def values(self) -> Array:
        """What the codes of a matrix stand for, float32 [N, K], whole in memory."""
        weights = self._blocks(0, self._outer[0])
        scales, zeros = self._chosen(0, self._outer[0], weights)
        found = block_values(weights, scales.astype(np.float32), zeros, self.form)
        return found.reshape(self._outer[0], -1)[:, : self._columns]

    def _codes(self, start: int, stop: int) -> Array:
        blocks = prod(self._outer[1:]) * self.form.blocks(self._columns)
        codes = np.empty((stop - start, blocks, self.form.block_bytes), np.uint8)
        for first, last in self._parts(start, stop):
            weights = self._blocks(first, last)
            scales, zeros = self._chosen(first, last, weights)
            made = block_codes(weights, scales.astype(np.float32), zeros, self.form)
            codes[first - start : last - start] = made.reshape(last - first, blocks, -1)
        self._require_kept()
        return codes.reshape(stop - start, *self._outer[1:], -1, self.form.block_bytes)

    def _zeros(self, start: int, stop: int) -> Array:
        zeros = self._chosen(start, stop)[1].reshape(-1, self.form.blocks(self._columns))
        return np.ascontiguousarray(pack(zeros, self.form.bits)).reshape(stop - start, *self._outer[1:], -1)

    def _scales(self, start: int, stop: int) -> Array:
        scales = self._chosen(start, stop)[0]
        self._require_kept()
        if stop == self._outer[0]:
            with self._lock:
                self._kept = None
        return scales.reshape(stop - start, *self._outer[1:], -1)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Rows `start:stop` in parts of about `ELEMENTS` weights."""
        step = max(1, ELEMENTS // (prod(self._outer[1:]) * self._columns))
        if self.transposed and len(self._outer) == 1:
            step = max(1, stop - start)  # its columns are read with the whole matrix
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def _blocks(self, start: int, stop: int) -> Array:
        """Rows `start:stop` of the first axis as float32 [blocks, size]."""
        if self.transposed and len(self._outer) == 1:
            rows = self._weight.read()[:, start:stop].T
        else:
            rows = self._weight.rows(start, stop)
            rows = rows.swapaxes(-1, -2) if self.transposed else rows
        wide = widened(np.ascontiguousarray(rows), self._name).reshape(-1, self._columns)
        padding = -self._columns % self.form.size
        return (np.pad(wide, ((0, 0), (0, padding))) if padding else wide).reshape(-1, self.form.size)

    def _chosen(self, start: int, stop: int, weights: Array | None = None) -> tuple[Array, Array]:
        """Scales and zero points of rows `start:stop`, [blocks] each, chosen once."""
        blocks = prod(self._outer[1:]) * self.form.blocks(self._columns)
        with self._lock:
            if self._kept is None:
                size = self._outer[0]
                scales = np.empty((size, blocks), self._scale_dtype.numpy)
                zeros = np.empty((size, blocks), np.uint8)
                self._kept = scales, zeros, np.zeros((size, 2)), np.zeros(size, bool)
            scales, zeros, squares, known = self._kept
        for first, last in [(start, stop)] if weights is not None else self._parts(start, stop):
            if not known[first:last].all():  # or another thread is about to choose them
                chosen, points = self._search(first, last, self._blocks(first, last) if weights is None else weights)
                scales[first:last] = stored_scales(chosen, self._scale_dtype, self._name).reshape(-1, blocks)
                squares[first:last] = squares_lost(chosen.reshape(-1, blocks), scales[first:last])
                zeros[first:last] = points.reshape(-1, blocks)
                known[first:last] = True
        return scales[start:stop].reshape(-1), zeros[start:stop].reshape(-1)

    def _require_kept(self) -> None:
        kept = self._kept
        if kept and kept[3].all():
            require_kept(kept[2], self._scale_dtype, self._name)

    def _search(self, start: int, stop: int, weights: Array) -> tuple[Array, Array]:
        """Scales and zero points; each matrix of a stack has an importance of its own."""
        if self._importance.ndim == 1:
            return block_scales(weights, self.form, self._importance)
        matrices = zip(np.split(weights, stop - start), self._importance[start:stop], strict=True)
        scales, zeros = zip(*(block_scales(one, self.form, factors) for one, factors in matrices), strict=True)
        return np.concatenate(scales), np.concatenate(zeros)


def widened(rows: Array, name: str | None = None) -> Array:
    """Rows in float32; those of a named tensor must be finite, or InputRefused is raised."""
    wide: Array = rows.astype(np.float32, copy=False) if rows.dtype != BFLOAT16 else NONE
    if rows.dtype == BFLOAT16:  # a shift of the bits; `ml_dtypes` holds the interpreter lock
        wide = (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if name is not None and not np.isfinite(wide.sum(dtype=np.float64)) and not np.isfinite(wide).all():
        raise InputRefused(
            f"`{name}` contains infinite or NaN values, which have no code",
            hint="look at the model with `llmconv inspect`; `--quant-exclude` leaves a weight as it is",
        )
    return wide


FLOAT32 = BY_NAME["float32"]
SMOOTHING, OUTPUTS = ".smoothing", ".smoothing_outputs"  # suffixes of the names of factors
IMPORTANCE = ".importance"  # that of the columns, with which scales were searched; `verify` searches again


def multiplied(weight: LazyTensor, factors: Array) -> LazyTensor:
    """A matrix in float32, multiplied block by block of its rows: [N, K] with factors [K], or [K, N] with [K, 1].

    Outputs are multiplied with [N, 1], or with [N] of a matrix [K, N].
    """

    def rows(start: int, stop: int) -> Array:
        mine = factors[start:stop] if factors.ndim > 1 else factors
        return widened(weight.rows(start, stop)) * mine

    return LazyTensor(FLOAT32, weight.shape, rows)


def stored_factors(name: str, factors: Array, end: str = SMOOTHING) -> dict[str, LazyTensor]:
    return {name + end: in_memory(factors, FLOAT32)}


INT8 = BY_NAME["int8"]


class ColumnTensor:
    """A weight [N, K] or [experts, N, K], in `ColumnFormat`; matrices of a `transposed` one are stored as [K, N]."""

    def __init__(self, name: str, weight: LazyTensor, *, transposed: bool = False) -> None:
        self._name, self._weight, self._transposed = name, weight, transposed
        *self._stack, rows, columns = weight.shape
        self._inputs, self._outputs = (rows, columns) if transposed else (columns, rows)
        self._lock = threading.Lock()
        self._kept: Array | None = None

    def tensors(self) -> dict[str, LazyTensor]:
        """Codes int8 [K, N], scales float32 [N], by name; a stack has the axis of its experts in front."""
        stack = self._stack
        codes = LazyTensor(INT8, (*stack, self._inputs, self._outputs), self._stacked if stack else self._rows)
        if not stack and not self._transposed:
            codes = transposed(LazyTensor(INT8, self._weight.shape, self._rows))
        scales = LazyTensor(FLOAT32, (*stack, self._outputs), lambda start, stop: self._scales()[start:stop])
        return {self._name + CODES: codes, self._name + SCALES: scales}

    def _rows(self, start: int, stop: int) -> Array:
        """Codes of rows as they are stored, [K, N] or [N, K]."""
        scales = self._scales()[None] if self._transposed else self._scales()[start:stop, None]
        return _codes(self._read(start, stop), scales)

    def _stacked(self, start: int, stop: int) -> Array:
        values = self._read(start, stop)
        values = values if self._transposed else values.swapaxes(1, 2)
        return np.ascontiguousarray(_codes(values, self._scales()[start:stop, None, :]))

    def _scales(self) -> Array:
        """By column; 1 for a column of zeros, as onnxruntime's `quantize_dynamic` has it."""
        with self._lock:
            if self._kept is None:
                axis = -2 if self._transposed else -1
                parts = [np.abs(self._read(*block)).max(axis=axis) for block in self._weight.blocks()]
                is_cut = self._transposed and not self._stack
                largest: Array = np.max(parts, axis=0) if is_cut else np.concatenate(parts)
                scales = largest.astype(np.float32) / np.float32(LARGEST)
                self._kept = np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1)).astype(np.float32)
            return self._kept

    def _read(self, start: int, stop: int) -> Array:
        return widened(self._weight.rows(start, stop), self._name)


def _codes(values: Array, scales: Array) -> Array:
    return np.clip(np.rint(values / scales), -LARGEST, LARGEST).astype(np.int8)


@dataclass(frozen=True)
class RoundedCodes:
    """The codes of a weight [N, K], or of a stack [experts, N, K]."""

    parts: dict[str, Array]  # arrays by suffix, as in `QuantizedTensor.tensors`, mapped from the scratch file
    scale_dtype: DType

    def put(self, index: int | None, form: BlockFormat, codes: Array, scales: Array, zeros: Array) -> None:
        """Stores codes uint8 [N, K] (K padded to whole blocks), scales float32 [N, blocks] and zeros uint8 [N, blocks].

        `index` is of the matrix in a stack; None for a weight that is one matrix.
        """
        made = {
            CODES: pack(codes.reshape(-1, form.size), form.bits).reshape(*scales.shape, form.block_bytes),
            SCALES: scales.astype(self.scale_dtype.numpy),
            ZEROS: pack(zeros, form.bits),
        }
        for suffix, array in self.parts.items():
            array[slice(None) if index is None else index] = made[suffix]

    def tensors(self, name: str) -> dict[str, LazyTensor]:
        """The tensors by name, as `QuantizedTensor.tensors`."""

        def lazy(array: Array, dtype: DType) -> LazyTensor:
            return LazyTensor(dtype, array.shape, lambda start, stop: np.ascontiguousarray(array[start:stop]))

        dtypes = {CODES: BYTES, ZEROS: BYTES, SCALES: self.scale_dtype}
        return {name + suffix: lazy(array, dtypes[suffix]) for suffix, array in self.parts.items()}


class Scratch:
    """An unnamed file, open for reading and writing, which the system removes with the process.

    Its methods raise OutputFailed for a full disk.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._end = file, 0

    @classmethod
    @contextmanager
    def next_to(cls, output: Path) -> Iterator[Scratch]:
        """Context with a scratch file in the file system of a folder that may not exist yet."""
        home = next(folder for folder in output.absolute().parents if folder.is_dir())
        with tempfile.TemporaryFile(dir=home) as file:
            yield cls(file)

    def codes(self, outer: tuple[int, ...], columns: int, form: BlockFormat, scale_dtype: DType) -> RoundedCodes:
        """Room for the codes of a weight with K `columns` and the outer axes [N], or [experts, N]."""
        made = {suffix: self._array(shape, np.dtype(np.uint8)) for suffix, shape in byte_shapes(outer, columns, form)}
        return RoundedCodes(
            {**made, SCALES: self._array((*outer, form.blocks(columns)), scale_dtype.numpy)}, scale_dtype
        )

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        start = -(-self._end // 8) * 8
        self._end = start + prod(shape) * dtype.itemsize
        with failing_safely():
            self._file.truncate(self._end)
            if hasattr(os, "posix_fallocate"):  # a write to a mapped page that the disk has no room for is a SIGBUS
                os.posix_fallocate(self._file.fileno(), start, self._end - start)
        return np.memmap(self._file, dtype, "r+", start, shape)
