"""TaskVectors: the separate update of each weight by each adapter, for methods that do more than add them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.combining.methods import Combination, TaskVector, combine
from llmconv.convert.adapters.low_rank_sum import LoraProduct
from llmconv.convert.adapters.placement.edits import Edits
from llmconv.convert.adapters.placement.weight_updates import add_changes
from llmconv.files.source_file import open_source
from llmconv.tensors import BLOCK_BYTES, BY_NAME, Array, DType, LazyTensor

FLOAT64 = BY_NAME["float64"]


class TaskVectors:
    """Each adapter placed alone on the same base.

    Attributes:
        summed: updates are only added, so they are not computed separately.
        order: numbers of the adapters sorted by content, so that sums do not depend on the order given.
    """

    def __init__(
        self, base: Edits, adapters: Sequence[Adapter], weights: Sequence[float], combination: Combination
    ) -> None:
        """Places the adapters, unless they are only summed.

        Args:
            base: without edits.
            adapters: all adapters.
            weights: one per adapter.
            combination: the method and its options.

        Raises:
            MalformedInput, UnsupportedInput: see `Edits.place`.
        """
        self.summed = combination.is_sum
        self._combination, self._weights = combination, weights
        alone = len(adapters) == 1 and self.summed
        self._keys = [""] if alone else [_digest(adapter) for adapter in adapters]
        self.order = sorted(range(len(adapters)), key=lambda number: (self._keys[number], weights[number]))
        self._alone = [] if self.summed else [_placed(base, adapter) for adapter in adapters]

    def combined(self, name: str, current: LazyTensor, dtype: DType) -> LazyTensor:
        """The weight with the combined update, rounded once to `dtype`.

        Args:
            name: of the tensor.
            current: the weight before the update.
            dtype: element type of the result.
        """
        vectors = [
            TaskVector(
                _difference(edits, name),
                self._weights[number],
                self._combination.density(number),
                self._keys[number],
                _factors(edits, name),
            )
            for number, edits in enumerate(self._alone)
            if name in edits.changes
        ]
        return combine(current, name, vectors, self._combination, dtype)


def _placed(base: Edits, adapter: Adapter) -> Edits:
    edits = Edits(dict(base.tensors), base.config, base.tied, naming=base.naming)
    edits.place(adapter, 1.0)
    return edits


def _digest(adapter: Adapter) -> str:
    """sha256 of the adapter's config and weights."""
    digest = hashlib.sha256(adapter.settings.read_bytes())
    for path in adapter.weights:
        with open_source(path) as file:
            while chunk := file.read(BLOCK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _difference(edits: Edits, name: str) -> LazyTensor:
    """The update of a weight by one adapter, float64: the result minus the weight, for any kind of update."""
    weight = edits.current(name)
    result = add_changes(weight, edits.changes[name], FLOAT64)

    def load(start: int, stop: int) -> Array:
        made: Array = result.rows(start, stop) - weight.rows(start, stop).astype(np.float64)
        return made

    return LazyTensor(FLOAT64, weight.shape, load)


def _factors(edits: Edits, name: str) -> Callable[[], tuple[Array, Array]] | None:
    """Returns two thin matrices with the update as their product, for a matrix with LoRA updates only."""
    changes, weight = edits.changes[name], edits.current(name)
    plain = [change for change in changes if isinstance(change, LoraProduct)]
    if len(plain) != len(changes) or len(weight.shape) != 2:
        return None

    def make() -> tuple[Array, Array]:
        pairs = [change.factors(0, weight.num_rows) for change in plain]
        return np.hstack([left for left, _ in pairs]), np.vstack([right for _, right in pairs])

    return make
