"""ArrayCache: a cache as numpy arrays, which every runner can continue; functions that select rows and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmconv.runtime.cache_names import is_state
from llmconv.runtime.runner import Cache
from llmconv.tensors import Array

TOKEN_AXIS = 2
"""The token axis of keys and values."""


@dataclass(frozen=True)
class ArrayCache:
    """A cache as numpy arrays.

    Attributes:
        content: arrays by the names of the graph's outputs.
        length: number of tokens, padding included.
    """

    content: Mapping[str, Array]
    length: int

    def arrays(self) -> Mapping[str, Array]:
        """See `Cache.arrays`."""
        return self.content


def can_be_cut(cache: Cache) -> bool:
    """Whether every layer keeps keys and values of every token, so that the cache can be truncated."""
    return all(not is_state(name) and array.shape[TOKEN_AXIS] == cache.length for name, array in cache.arrays().items())


def rows_of(cache: Cache, rows: Sequence[int]) -> ArrayCache:
    """The given rows of a cache, in that order, possibly repeated."""
    return ArrayCache({name: array[list(rows)] for name, array in cache.arrays().items()}, cache.length)


def cut(cache: Cache, length: int) -> ArrayCache:
    """The first `length` tokens of a cache, see `can_be_cut`."""
    return ArrayCache({name: array[:, :, :length] for name, array in cache.arrays().items()}, length)


def moved_right(cache: Cache, shifts: Sequence[int], virtual: int = 0) -> ArrayCache:
    """Copies of a cache of one row, each shifted right along the token axis; tokens beyond the end are dropped.

    Such a row can be continued like a prompt with that much padding on the left.

    Args:
        cache: a cache of one row, see `can_be_cut`.
        shifts: tokens, 0 or more, per row of the result.
        virtual: number of first tokens that are not shifted.
    """
    moved = {name: _moved(array, shifts, virtual) for name, array in cache.arrays().items()}
    return ArrayCache(moved, cache.length)


def _moved(array: Array, shifts: Sequence[int], virtual: int) -> Array:
    length = array.shape[TOKEN_AXIS] - virtual
    moved = np.zeros((len(shifts), *array.shape[1:]), dtype=array.dtype)
    moved[:, :, :virtual] = array[:, :, :virtual]
    for row, shift in enumerate(shifts):
        start = min(shift, length)
        moved[row, :, virtual + start :] = array[0, :, virtual : virtual + length - start]
    return moved
