"""ColumnTensor: a weight as lazy int8 codes [K, N] and scales [N], of which only a panel is in memory."""

from __future__ import annotations

import threading

import numpy as np

from llmconv.errors import InputRefused
from llmconv.export.quantization.column_format import LARGEST
from llmconv.export.quantization.quantized_tensor import CODES, SCALES, widened
from llmconv.tensors import BY_NAME, Array, LazyTensor
from llmconv.transpose import transposed

INT8, FLOAT32 = BY_NAME["int8"], BY_NAME["float32"]


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
            codes = transposed(LazyTensor(INT8, self._weight.shape, self._columns))
        scales = LazyTensor(FLOAT32, (*stack, self._outputs), lambda start, stop: self._scales()[start:stop])
        return {self._name + CODES: codes, self._name + SCALES: scales}

    def _rows(self, start: int, stop: int) -> Array:
        """Codes of rows of a matrix that is stored as [K, N]."""
        return _codes(self._read(start, stop), self._scales()[None])

    def _columns(self, start: int, stop: int) -> Array:
        """Codes of rows of a matrix that is stored as [N, K]."""
        return _codes(self._read(start, stop), self._scales()[start:stop, None])

    def _stacked(self, start: int, stop: int) -> Array:
        values = self._read(start, stop)
        values = values if self._transposed else values.swapaxes(1, 2)
        return np.ascontiguousarray(_codes(values, self._scales()[start:stop, None, :]))

    def _scales(self) -> Array:
        """Scales of all outputs, read once."""
        with self._lock:
            if self._kept is None:
                self._kept = _stored(self._extremes())
            return self._kept

    def _extremes(self) -> Array:
        """The largest absolute value of every output."""
        axis = -2 if self._transposed else -1
        parts = [np.abs(self._read(*block)).max(axis=axis) for block in self._weight.blocks()]
        if self._stack or not self._transposed:
            return np.concatenate(parts)
        found: Array = np.max(parts, axis=0)
        return found

    def _read(self, start: int, stop: int) -> Array:
        wide = widened(self._weight.rows(start, stop))
        if not np.isfinite(wide.sum(dtype=np.float64)) and not np.isfinite(wide).all():
            raise InputRefused(
                f"`{self._name}` contains infinite or NaN values, which have no code",
                hint="look at the model with `llmconv inspect`; `--quant-exclude` leaves a weight as it is",
            )
        return wide


def _stored(extremes: Array) -> Array:
    """Scales; 1 for a column of zeros, as onnxruntime's `quantize_dynamic` has it."""
    scales = extremes.astype(np.float32) / np.float32(LARGEST)
    return np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1)).astype(np.float32)


def _codes(values: Array, scales: Array) -> Array:
    """The nearest codes."""
    nearest = np.rint(values / scales)
    codes: Array = np.clip(nearest, -LARGEST, LARGEST).astype(np.int8)
    return codes
