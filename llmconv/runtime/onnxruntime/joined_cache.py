"""Caches of several texts that run in one call: rows join and leave between steps, and all end at the same column.

A row of n tokens in a batch of m columns is like a prompt with m - n columns of padding on its left: keys contain their
positions, so a row can stand at any column, and the attention mask hides what is before it. States belong to whole
rows.

`SlotCache` keeps shared buffers with a slot per row, so that a row that joins or leaves is copied, and no other.
`CopiedCache` joins caches of any other kind by copies of all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from llmconv.runtime.extra_inputs import is_state
from llmconv.runtime.onnxruntime.shared_buffers import ROUNDING, BufferCache, CacheBuffers
from llmconv.runtime.runner import (
    TOKEN_AXIS,
    ArrayCache,
    Cache,
    ExtendedCache,
    RemoteCache,
    can_be_cut,
    rows_of,
)
from llmconv.tensors import Array


def can_be_joined(cache: Cache) -> bool:
    """Whether every array is a state, or keeps keys and values of every token."""
    if isinstance(cache, RemoteCache):
        return False
    return all(is_state(name) or array.shape[TOKEN_AXIS] == cache.length for name, array in cache.arrays().items())


class JoinedCache(ABC):
    """The caches of several rows; `lengths` are their numbers of tokens, in order."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.columns = 0  # of which a row has its last ones

    @staticmethod
    def like(cache: Cache) -> JoinedCache:
        """An empty one for caches of the kind of `cache`."""
        in_slots = isinstance(cache, BufferCache) and cache.buffers.is_on_host and can_be_cut(cache)
        return SlotCache() if in_slots else CopiedCache()

    def mask(self) -> Array:
        """The attention mask of a step of one token, int64 [rows, columns + 1]."""
        mask = np.zeros((len(self.lengths), self.columns + 1), dtype=np.int64)
        for row, length in enumerate(self.lengths):
            mask[row, self.columns - length :] = 1
        return mask

    @abstractmethod
    def add(self, cache: Cache) -> None:
        """Appends the row of a cache of one row."""

    @abstractmethod
    def take(self, at: int) -> Cache:
        """Removes a row and returns its own cache; the last row takes its place."""

    @abstractmethod
    def past(self) -> Cache:
        """What a step of all rows continues."""

    def grew(self, present: Cache) -> None:
        """Notes the cache that a step of all rows has returned."""
        self.columns += 1
        self.lengths = [length + 1 for length in self.lengths]

    @abstractmethod
    def before(self, at: int) -> Cache:
        """What the last step continued, of one row, which then may run again by itself."""


class CopiedCache(JoinedCache):
    """Rows in a cache of any kind, which is copied whenever a row joins or leaves."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: Cache = ArrayCache({}, 0)
        self._before: Cache = self._cache
        self._kept: Cache = self._cache

    def add(self, cache: Cache) -> None:
        arrays, width = cache.arrays(), max(self.columns, cache.length)
        if self.lengths:
            mine = self._cache.arrays()
            arrays = {
                name: np.concatenate([_widened(name, mine[name], width), _widened(name, array, width)])
                for name, array in arrays.items()
            }
        self._cache, self.columns = ArrayCache(arrays, width), width
        self.lengths.append(cache.length)

    def take(self, at: int) -> Cache:
        length, last = self.lengths[at], len(self.lengths) - 1
        arrays = rows_of(self._cache, [at]).arrays()
        self.lengths[at] = self.lengths[last]
        self.lengths.pop()
        if last:
            kept = [last if row == at else row for row in range(last)]
            longest = max(self.lengths)
            left = rows_of(self._cache, kept).arrays()
            self._cache, self.columns = ArrayCache(_narrowed(left, longest), longest), longest
        else:
            self.columns = 0
        return ArrayCache(_narrowed(arrays, length), length)

    def past(self) -> Cache:
        self._kept = self._cache.kept() if isinstance(self._cache, ExtendedCache) else self._cache
        return self._cache

    def grew(self, present: Cache) -> None:
        super().grew(present)
        self._cache, self._before = present, self._kept

    def before(self, at: int) -> Cache:
        return rows_of(self._before, [at])


def _widened(name: str, array: Array, columns: int) -> Array:
    """Keys or values [rows, heads, columns, size] with zeros on the left."""
    missing = 0 if is_state(name) else columns - array.shape[TOKEN_AXIS]
    return np.pad(array, [(0, 0), (0, 0), (missing, 0), (0, 0)]) if missing else array


def _narrowed(arrays: Mapping[str, Array], columns: int) -> dict[str, Array]:
    """The last columns of keys and values."""
    return {
        name: array if is_state(name) else array[:, :, array.shape[TOKEN_AXIS] - columns :]
        for name, array in arrays.items()
    }


class SlotCache(JoinedCache):
    """Rows in shared buffers [slots, heads, capacity, size] on the host, one slot each."""

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []
        self._arrays: list[Array] = []
        self._views: dict[tuple[int, int], CacheBuffers] = {}  # by first and last slot, as sessions are bound to them

    def add(self, cache: Cache) -> None:
        rows, length = len(self.lengths), cache.length
        content = list(cache.arrays().values())
        if not self._arrays:
            self._names = list(cache.arrays())
            self._arrays = [np.zeros((0, array.shape[1], 0, array.shape[3]), array.dtype) for array in content]
        width = max(self.columns, length)
        self._make_room(rows + 1, width)
        self._move(width - self.columns)
        for array, own in zip(self._arrays, content, strict=True):
            array[rows, :, : width - length] = 0  # what an earlier row has left there
            array[rows, :, width - length : width] = own[0]
        self.lengths.append(length)

    def take(self, at: int) -> Cache:
        length, last = self.lengths[at], len(self.lengths) - 1
        columns = slice(self.columns - length, self.columns)
        taken = {
            name: array[at : at + 1, :, columns].copy() for name, array in zip(self._names, self._arrays, strict=True)
        }
        if at != last:
            for array in self._arrays:
                array[at, :, : self.columns] = array[last, :, : self.columns]
        self.lengths[at] = self.lengths[last]
        self.lengths.pop()
        longest = max(self.lengths, default=0)
        if not longest:
            self.columns, self._arrays, self._views = 0, [], {}
        elif 2 * longest + ROUNDING < self.columns:  # attention reads all columns
            self._move(longest - self.columns)
        return ArrayCache(taken, length)

    def past(self) -> Cache:
        self._make_room(len(self.lengths), self.columns + 1)
        return self._view(0, len(self.lengths), self.columns)

    def grew(self, present: Cache) -> None:
        view = self._views[0, len(self.lengths)]
        assert isinstance(present, BufferCache) and present.buffers is view, "the step wrote into other memory"
        super().grew(present)

    def before(self, at: int) -> Cache:
        return self._view(at, at + 1, self.columns - 1)

    def _view(self, start: int, stop: int, columns: int) -> BufferCache:
        """The slots from `start` to `stop` as a cache of that many columns, in the same memory."""
        if (start, stop) not in self._views:
            self._views[start, stop] = CacheBuffers.over([array[start:stop] for array in self._arrays])
        buffers = self._views[start, stop]
        buffers.filled = columns
        return BufferCache(self._names, buffers, stop - start, columns)

    def _make_room(self, rows: int, columns: int) -> None:
        """Makes room for that many slots and columns."""
        slots, capacity = self._arrays[0].shape[0], self._arrays[0].shape[2]
        if rows <= slots and columns < capacity:
            return
        slots = slots if rows <= slots else max(rows, 2 * slots)
        if columns >= capacity:
            capacity = -(-max(columns + 1, 2 * capacity) // ROUNDING) * ROUNDING
        used = slice(0, len(self.lengths)), slice(None), slice(0, self.columns)
        for at, array in enumerate(self._arrays):
            larger = np.zeros((slots, array.shape[1], capacity, array.shape[3]), array.dtype)
            larger[used] = array[used]
            self._arrays[at] = larger
        self._views = {}

    def _move(self, columns: int) -> None:
        """Moves all rows to the right, or to the left, where only columns that no row has may be lost."""
        if columns and self.lengths:
            rows, old, new = len(self.lengths), self.columns, self.columns + columns
            first = max(-columns, 0)
            for array in self._arrays:
                array[:rows, :, first + columns : new] = array[:rows, :, first:old].copy()
                array[:rows, :, : max(columns, 0)] = 0
        self.columns += columns
