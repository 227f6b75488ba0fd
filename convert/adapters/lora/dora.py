"""DoRA: a weight plus its low-rank product, with every output scaled to a trained magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from llmconv.convert.adapters.low_rank_sum import LoraProduct
from llmconv.tensors import Array, LazyTensor


@dataclass(frozen=True)
class DoraUpdate:
    """The update of one weight: m/‖V‖·V − W with V = W + s·B·A (PEFT `tuners/lora/dora.py`, `variants.py`).

    ‖V‖ is the L2 norm of the weights of each output: of a row, or of a column if the weight is stored in×out.

    Attributes:
        changes: products with the sum s·B·A, not multiplied by the adapter's weight.
        magnitude: m, one number per output.
        weight: the adapter's weight, by which the update is multiplied.
        columns: cache of m/‖V‖ for weights stored in×out.
    """

    changes: Sequence[LoraProduct]
    magnitude: LazyTensor
    weight: float
    columns: list[Array] = field(default_factory=list, compare=False)

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        """Rows `start:stop` of the update, float64, two-dimensional; see `WeightUpdate`."""
        old = _rows(base, start, stop)
        new = self._adapted(base, old, start, stop)
        if self.changes[0].transposed:
            new *= self._column_factors(base)
        else:
            new *= _factors(self._magnitudes[start:stop], np.square(new).sum(axis=1))[:, None]
        return self.weight * (new - old)

    def _adapted(self, base: LazyTensor, old: Array, start: int, stop: int) -> Array:
        """Rows of V."""
        new = old.copy()
        for change in self.changes:
            new += change.update(base, start, stop)
        return new

    @cached_property
    def _magnitudes(self) -> Array:
        return self.magnitude.read().astype(np.float64).reshape(-1)

    def _column_factors(self, base: LazyTensor) -> Array:
        """m/‖V‖ of each column: one pass over the whole weight, block by block."""
        if not self.columns:
            squares = np.zeros(base.shape[1])
            for start, stop in base.blocks():
                squares += np.square(self._adapted(base, _rows(base, start, stop), start, stop)).sum(axis=0)
            self.columns.append(_factors(self._magnitudes, squares))
        return self.columns[0]


def _rows(tensor: LazyTensor, start: int, stop: int) -> Array:
    return tensor.rows(start, stop).reshape(stop - start, -1).astype(np.float64)


def _factors(magnitudes: Array, squares: Array) -> Array:
    """m/‖V‖; 0 for outputs with zero weights."""
    norms = np.sqrt(squares)
    return np.divide(magnitudes, norms, out=np.zeros_like(norms), where=norms > 0)
