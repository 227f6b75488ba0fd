"""ValueComparison: whether an inner value of the graph equals that of the eager model, within its rounding noise."""

from __future__ import annotations

import re

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.bisect.recording import RecordedValue
from llmconv.verify.results.sigma import GATES, Measure, NoiseFloor, measure
from llmconv.verify.scenarios.calls import Call

HIDDEN = -1e30
"""Masks add numbers below this to hidden scores, in every dtype."""

ROW = 8
"""Minimum number of features of a row; a value with a shorter last axis is a single row."""


class ValueComparison:
    """Compares values of one call.

    Args:
        dtype: numpy name of the graph's dtype.
        call: the call, with the padding in its mask.
        virtual: number of prefix tokens before the cache.
    """

    def __init__(self, dtype: str, call: Call, virtual: int = 0) -> None:
        self._floor, self._gates = NoiseFloor(dtype), GATES[dtype]
        self._new = call.valid
        self._all = np.pad(call.attention_mask == 1, ((0, 0), (virtual, 0)), constant_values=True)

    def agrees(self, record: RecordedValue, value: Array) -> bool:
        """Whether a value equals the record up to rounding; the order of elements matters, the shape does not."""
        if value.size != record.exact.size:
            return False
        if record.exact.dtype.kind != "f" or value.dtype.kind != "f":
            return self._same(record, value)
        found = self.measure(record, value)
        return found is not None and found.passes(self._gates)

    def measure(self, record: RecordedValue, value: Array) -> Measure | None:
        """The error of a float value of as many elements as the record; None if the two mask different elements."""
        arrays = (record.exact, record.rounded, value.reshape(record.exact.shape))
        hidden = [array < HIDDEN for array in arrays]
        if not (np.array_equal(hidden[0], hidden[1]) and np.array_equal(hidden[0], hidden[2])):
            return None
        counts = self.counted(record)
        exact, rounded, found = (_rows(np.where(counts, array, 0)) for array in arrays)
        valid = np.asarray(_rows(counts).any(axis=-1))
        truth = self._floor.truth(re.sub(r"\d+", "#", f"{record.scope} {record.op}"), exact, rounded, valid)
        return measure(truth, found)

    def counted(self, record: RecordedValue) -> Array:
        """Which elements of a record are compared (neither padding nor masked), bool of its shape."""
        if record.exact.dtype.kind != "f":
            return self._counts(record.exact.shape, masks=True)
        hidden = record.exact < HIDDEN
        return ~hidden & self._counts(record.exact.shape, masks=bool(hidden.any()))

    def _same(self, record: RecordedValue, value: Array) -> bool:
        """Whether integers or booleans are equal, except in padding."""
        counts = self.counted(record)
        found = value.reshape(record.exact.shape)
        return bool(np.array_equal(np.where(counts, found, 0), np.where(counts, record.exact, 0)))

    def _counts(self, shape: tuple[int, ...], masks: bool) -> Array:
        """Which elements are not padding, judged by the sizes of the axes; doubtful ones count as padding.

        Args:
            shape: of a value.
            masks: the value is a mask, whose last axis also contains padding.
        """
        batch, tokens = self._new.shape
        counts = np.ones(shape, dtype=bool)
        if self._all.all() or not shape or shape[0] % batch:
            return counts
        if shape[0] == batch * tokens:
            counts &= _along(self._new.reshape(-1), shape, (0,))
        each = shape[0] // batch
        for rows in (self._new, self._all):
            for axis in range(1, len(shape) - masks):
                if shape[axis] == rows.shape[1]:
                    counts &= _along(np.repeat(rows, each, axis=0), shape, (0, axis))
        return counts


def _along(mask: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """A mask over some axes, reshaped to broadcast to `shape`."""
    wide: Array = mask.reshape([size if axis in axes else 1 for axis, size in enumerate(shape)])
    return wide


def _rows(array: Array) -> Array:
    """The array as [1, rows, features]."""
    features = array.shape[-1] if array.ndim and array.shape[-1] >= ROW else array.size
    return array.reshape(1, -1, features)
