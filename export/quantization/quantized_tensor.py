"""QuantizedTensor: a weight as lazy codes, scales and zero points, of which only a block of rows is in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import prod

import ml_dtypes
import numpy as np

from llmconv.errors import InputRefused
from llmconv.export.quantization.block_format import BlockFormat
from llmconv.export.quantization.block_rounding import NONE, block_codes, block_scales, block_values, pack
from llmconv.export.quantization.stored_scales import require_kept, squares_lost, stored_scales
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor

CODES, SCALES, ZEROS, ORDER = ".codes", ".scales", ".zeros", ".order"
"""Suffixes of the tensors' names."""

ELEMENTS = 1 << 19
"""Weights that are rounded at once: 2 MB in float32, which fit into a core's cache."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BYTES = BY_NAME["uint8"]


class QuantizedTensor:
    """A weight whose matrices [N, K] are stored in a `BlockFormat`.

    Scales are chosen with the codes and kept until they are written, so that nothing is searched twice when a file has
    codes, zero points and scales in this order; in any other order the result is the same.

    Args:
        weight: [N, K], or a stack [experts, N, K].
        form: bits, block size, symmetry, search.
        transposed: its matrices are stored as [K, N].
        scale_dtype: element type of the scales, to which they are rounded before the codes are.
        importance: float32 [K], or [experts, K] for a stack; empty if all columns count alike.
    """

    def __init__(
        self,
        name: str,
        weight: LazyTensor,
        form: BlockFormat,
        *,
        transposed: bool = False,
        scale_dtype: DType = BY_NAME["float32"],
        importance: Array = NONE,
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
        form, outer = self.form, self._outer
        blocks = form.blocks(self._columns)
        made = {CODES: LazyTensor(BYTES, (*outer, blocks, form.block_bytes), self._codes)}
        if not form.symmetric:
            made[ZEROS] = LazyTensor(BYTES, (*outer, form.zero_bytes(self._columns)), self._zeros)
        made[SCALES] = LazyTensor(self._scale_dtype, (*outer, blocks), self._scales)
        return {self._name + suffix: tensor for suffix, tensor in made.items()}

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
        wide = widened(np.ascontiguousarray(rows)).reshape(-1, self._columns)
        if not np.isfinite(wide.sum(dtype=np.float64)):
            self._require_finite(wide)
        padding = -self._columns % self.form.size
        return (np.pad(wide, ((0, 0), (0, padding))) if padding else wide).reshape(-1, self.form.size)

    def _require_finite(self, values: Array) -> None:
        if not np.isfinite(values).all():
            raise InputRefused(
                f"`{self._name}` contains infinite or NaN values, which have no code",
                hint="look at the model with `llmconv inspect`; `--quant-exclude` leaves a weight as it is",
            )

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
        """Checks the scales as soon as all are chosen."""
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


def widened(rows: Array) -> Array:
    """Contiguous rows in float32."""
    if rows.dtype == BFLOAT16:  # a shift of the bits; `ml_dtypes` holds the interpreter lock
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32, copy=False)
