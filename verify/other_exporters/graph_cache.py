"""ForeignCache: the keys and values of a foreign graph, in the order of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.scenarios.calls import CacheEdit
from llmconv.verify.scenarios.synthetic_past import SyntheticPast


@dataclass(frozen=True)
class ForeignCache:
    """What a graph gave as its cache, and the tokens that are in it.

    Attributes:
        kept: keys and values in the order of the tokens, `[batch, heads, tokens, head_dim]` by name; a sliding layer
            may keep its last ones only.
        given: the same as the graph gave them, to be its next past.
        input_ids, position_ids: of all tokens so far, `[batch, length]`.
    """

    kept: Mapping[str, Array]
    given: Mapping[str, Array]
    input_ids: Array
    position_ids: Array

    @classmethod
    def made_up(cls, past: SyntheticPast) -> ForeignCache:
        """A past of which there are no tokens: zeros stand for them."""
        arrays = past.arrays()
        none = np.zeros((past.rows, past.length), dtype=np.int64)
        return cls(arrays, arrays, none, none)

    @property
    def length(self) -> int:
        """Tokens so far, padding included."""
        return int(self.input_ids.shape[1])

    def arrays(self) -> dict[str, Array]:
        """See `Cache.arrays`; zeros stand where a layer has forgotten."""
        return {name: _filled_in_front(array, self.length) for name, array in self.kept.items()}

    def edited(self, edit: CacheEdit, mask: Array) -> ForeignCache:
        """See `CacheEdit.apply`; of a ring the rows alone are exchanged."""
        rows = list(edit.rows) if edit.rows is not None else slice(None)
        end = self.length - edit.drop
        ids, positions = self.input_ids[rows, :end], self.position_ids[rows, :end]
        whole = {name for name, array in self.kept.items() if self.given[name] is array}
        arrays = {
            name: edit.of_array(name, array, mask) if name in whole else array[rows]
            for name, array in self.given.items()
        }
        kept = {name: arrays[name] if name in whole else array[rows] for name, array in self.kept.items()}
        return ForeignCache(kept, arrays, ids, positions)


def _filled_in_front(array: Array, length: int) -> Array:
    missing = length - array.shape[2]
    return np.pad(array, ((0, 0), (0, 0), (missing, 0), (0, 0))) if missing > 0 else array


def unrolled(ring: Array, length: int) -> Array:
    """The last tokens of a ring in their order: token t lies in slot t modulo the ring's slots.

    Args:
        ring: `[batch, heads, slots, head_dim]`.
        length: tokens so far.
    """
    slots = ring.shape[2]
    return ring[:, :, np.arange(max(0, length - slots), length) % slots]
