"""ExternalCache: the keys and values of an external graph, in the order of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.scenarios.calls import CacheEdit
from llmconv.verify.scenarios.synthetic_past import SyntheticPast


@dataclass(frozen=True)
class ExternalCache:
    """The cache that a graph returned, with its tokens.

    Attributes:
        kept: keys and values in the order of the tokens, `[batch, heads, tokens, head_dim]` by name; a sliding layer
            may keep the last tokens only.
        given: keys and values as the graph returned them; its next past.
        input_ids, position_ids: all tokens and positions so far, int64 `[batch, length]`.
    """

    kept: Mapping[str, Array]
    given: Mapping[str, Array]
    input_ids: Array
    position_ids: Array

    @classmethod
    def made_up(cls, past: SyntheticPast) -> ExternalCache:
        """A synthetic past, whose tokens are unknown and therefore 0."""
        arrays = past.arrays()
        unknown = np.zeros((past.rows, past.length), dtype=np.int64)
        return cls(arrays, arrays, unknown, unknown)

    @property
    def length(self) -> int:
        """Number of tokens so far, padding included."""
        return int(self.input_ids.shape[1])

    def arrays(self) -> dict[str, Array]:
        """See `Cache.arrays`; tokens that a layer no longer keeps are zeros."""
        return {name: _padded_left(array, self.length) for name, array in self.kept.items()}

    def edited(self, edit: CacheEdit, mask: Array) -> ExternalCache:
        """See `CacheEdit.apply`; in ring buffers only the order of the rows changes."""
        rows = list(edit.rows) if edit.rows is not None else slice(None)
        end = self.length - edit.drop
        ids, positions = self.input_ids[rows, :end], self.position_ids[rows, :end]
        whole = {name for name, array in self.kept.items() if self.given[name] is array}
        arrays = {
            name: edit.of_array(name, array, mask) if name in whole else array[rows]
            for name, array in self.given.items()
        }
        kept = {name: arrays[name] if name in whole else array[rows] for name, array in self.kept.items()}
        return ExternalCache(kept, arrays, ids, positions)


def _padded_left(array: Array, length: int) -> Array:
    missing = length - array.shape[2]
    return np.pad(array, ((0, 0), (0, 0), (missing, 0), (0, 0))) if missing > 0 else array


def unroll_ring(ring: Array, length: int) -> Array:
    """The last tokens of a ring buffer in their order: token t is at index t modulo the size of the ring.

    Args:
        ring: `[batch, heads, size, head_dim]`.
        length: number of tokens so far.
    """
    size = ring.shape[2]
    return ring[:, :, np.arange(max(0, length - size), length) % size]
