"""ArrayCache: a cache as numpy arrays, which every runner can continue; functions that select rows and tokens.

A change of a cache is a `CacheEdit`: it is applied to arrays at once, and sent to the stages that have a `RemoteCache`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from llmconv.runtime.cache_names import is_state
from llmconv.runtime.runner import Cache
from llmconv.tensors import Array

TOKEN_AXIS = 2
"""The token axis of keys and values."""


@dataclass(frozen=True)
class ArrayCache:
    """A cache as numpy arrays by the names of the graph's outputs; `length` counts tokens, padding included."""

    content: Mapping[str, Array]
    length: int

    def arrays(self) -> Mapping[str, Array]:
        """See `Cache.arrays`."""
        return self.content


@dataclass(frozen=True)
class CacheEdit:
    """A change of a cache by `rows_of`, `cut` or `moved_right`.

    Attributes:
        kind: one of `EDITS`.
        numbers: the rows, the length, or the shifts.
        virtual: number of first tokens that are not shifted.
    """

    kind: str
    numbers: tuple[int, ...]
    virtual: int = 0

    def applied(self, cache: Cache) -> Cache:
        """The changed cache."""
        if isinstance(cache, RemoteCache):
            return cache.edited(self)
        length = self.numbers[0] if self.kind == "cut" else cache.length
        return ArrayCache({name: EDITS[self.kind](array, self) for name, array in cache.arrays().items()}, length)


@runtime_checkable
class RemoteCache(Cache, Protocol):
    """A cache that is not in this process, at least in part: its arrays cannot be read, but it can be edited."""

    @property
    def is_lost(self) -> bool:
        """Whether a part of it no longer exists, so that its tokens have to run again."""

    @property
    def is_cuttable(self) -> bool:
        """See `can_be_cut`."""

    def edited(self, edit: CacheEdit) -> Cache:
        """The cache after a change."""


def is_lost(cache: Cache) -> bool:
    """Whether a cache no longer exists where it was kept, so that its tokens have to run again."""
    return isinstance(cache, RemoteCache) and cache.is_lost


def can_be_cut(cache: Cache) -> bool:
    """Whether every layer keeps keys and values of every token, so that the cache can be truncated."""
    if isinstance(cache, RemoteCache):
        return cache.is_cuttable
    return all(not is_state(name) and array.shape[TOKEN_AXIS] == cache.length for name, array in cache.arrays().items())


def rows_of(cache: Cache, rows: Sequence[int]) -> Cache:
    """The given rows of a cache, in that order, possibly repeated."""
    return CacheEdit("rows", tuple(map(int, rows))).applied(cache)


def cut(cache: Cache, length: int) -> Cache:
    """The first `length` tokens of a cache, see `can_be_cut`."""
    return CacheEdit("cut", (int(length),)).applied(cache)


def moved_right(cache: Cache, shifts: Sequence[int], virtual: int = 0) -> Cache:
    """Copies of a cache of one row, each shifted right along the token axis; tokens beyond the end are dropped.

    Such a row can be continued like a prompt with that much padding on the left. `can_be_cut` must hold; `shifts` are 0
    or more per row of the result; the first `virtual` tokens are not shifted.
    """
    return CacheEdit("moved", tuple(map(int, shifts)), virtual).applied(cache)


def _rows(array: Array, edit: CacheEdit) -> Array:
    return array[list(edit.numbers)]


def _cut(array: Array, edit: CacheEdit) -> Array:
    return array[:, :, : edit.numbers[0]]


def _moved(array: Array, edit: CacheEdit) -> Array:
    shifts, virtual = edit.numbers, edit.virtual
    length = array.shape[TOKEN_AXIS] - virtual
    moved = np.zeros((len(shifts), *array.shape[1:]), dtype=array.dtype)
    moved[:, :, :virtual] = array[:, :, :virtual]
    for row, shift in enumerate(shifts):
        start = min(shift, length)
        moved[row, :, virtual + start :] = array[0, :, virtual : virtual + length - start]
    return moved


EDITS = {"rows": _rows, "cut": _cut, "moved": _moved}
"""What changes each array, by kind."""
