"""The sum of all updates of one weight, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from llmconv.convert.adapters.lora.experts import ExpertProduct, add_to_experts
from llmconv.convert.adapters.low_rank_sum import LoraProduct, add_products
from llmconv.convert.algebra.rounding import round_into
from llmconv.tensors import Array, DType, LazyTensor


class WeightUpdate(Protocol):
    """The update of one weight by one adapter: new value minus old value."""

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        """Rows `start:stop` of the update.

        Args:
            base: the weight, for updates that depend on it.
            start: first row.
            stop: end of the rows, excluded.

        Returns:
            float64, two-dimensional: all dimensions of the base after the first count as columns.
        """
        ...


WeightChange = LoraProduct | ExpertProduct | WeightUpdate
"""An update of a tensor; the first two kinds have faster sums."""


def add_changes(base: LazyTensor, changes: Sequence[WeightChange], dtype: DType) -> LazyTensor:
    """`base` plus the sum of `changes`, rounded once (nearest even) to `dtype`.

    Every update is relative to the original base, so their order does not matter.

    Args:
        base: the weight.
        changes: its updates, of the shape of `base`.
        dtype: element type of the result.
    """
    slabs = [change for change in changes if isinstance(change, ExpertProduct)]
    low_rank = [change for change in changes if isinstance(change, LoraProduct)]
    if slabs:
        return add_to_experts(base, slabs, dtype)
    if len(low_rank) == len(changes):
        return add_products(base, low_rank, dtype)
    return _add_updates(base, [change for change in changes if not isinstance(change, ExpertProduct)], dtype)


def _add_updates(base: LazyTensor, updates: Sequence[WeightUpdate], dtype: DType) -> LazyTensor:
    """The sum in float64, for updates other than a product of two factors."""

    def load(start: int, stop: int) -> Array:
        rows = base.rows(start, stop)
        total = rows.astype(np.float64).reshape(len(rows), -1)
        for update in updates:
            total += update.update(base, start, stop)
        result = np.empty(rows.shape, dtype.numpy)
        round_into(result, total.reshape(rows.shape))
        return result

    return LazyTensor(dtype, base.shape, load, lambda other: _add_updates(base, updates, other))
