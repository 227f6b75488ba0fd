"""What is done to one weight: the sum of the updates that each adapter makes of it, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from llmconv.convert.adapters.lora.experts import ExpertProduct, add_to_experts
from llmconv.convert.adapters.weighted_sum import LoraProduct, add_products
from llmconv.convert.algebra.rounding import round_into
from llmconv.tensors import Array, DType, LazyTensor


class WeightUpdate(Protocol):
    """What one adapter adds to one weight: its new value less the old one."""

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        """Rows `start:stop` of what is added.

        Args:
            base: the weight, whole, for updates that depend on it.
            start: first row.
            stop: row behind the last.

        Returns:
            float64, of two dimensions: what is behind the first dimension of the base counts as columns.
        """
        ...


WeightChange = LoraProduct | ExpertProduct | WeightUpdate
"""A change of a tensor; the first two have fast sums of their own."""


def add_changes(base: LazyTensor, changes: Sequence[WeightChange], dtype: DType) -> LazyTensor:
    """`base` plus the sum of `changes`, rounded once (nearest even) to `dtype`.

    Every update is of the base as it was, so their order does not count, and each adapter's weight scales all it does.
    """
    slabs = [change for change in changes if isinstance(change, ExpertProduct)]
    low_rank = [change for change in changes if isinstance(change, LoraProduct)]
    if slabs:
        return add_to_experts(base, slabs, dtype)
    if len(low_rank) == len(changes):
        return add_products(base, low_rank, dtype)
    return _add_updates(base, [change for change in changes if not isinstance(change, ExpertProduct)], dtype)


def _add_updates(base: LazyTensor, updates: Sequence[WeightUpdate], dtype: DType) -> LazyTensor:
    """The sum in float64, for updates that are more than a product of two factors."""

    def load(start: int, stop: int) -> Array:
        rows = base.rows(start, stop)
        total = rows.astype(np.float64).reshape(len(rows), -1)
        for update in updates:
            total += update.update(base, start, stop)
        result = np.empty(rows.shape, dtype.numpy)
        round_into(result, total.reshape(rows.shape))
        return result

    return LazyTensor(dtype, base.shape, load, lambda other: _add_updates(base, updates, other))
