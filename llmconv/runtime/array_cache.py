"""ArrayCache: a cache as plain arrays, which every runner can go on from; rows and slots can be taken from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmconv.runtime.cache_names import is_state
from llmconv.runtime.runner import Cache
from llmconv.tensors import Array

TOKEN_AXIS = 2
"""Of keys and values."""


@dataclass(frozen=True)
class ArrayCache:
    """See `Cache`.

    Attributes:
        content: arrays by the names of the graph's outputs.
        length: tokens in the cache, padding included.
    """

    content: Mapping[str, Array]
    length: int

    def arrays(self) -> Mapping[str, Array]:
        """By name, see `Cache.arrays`."""
        return self.content


def can_be_cut(cache: Cache) -> bool:
    """Whether every layer keeps one slot per token and nothing else, so that the first tokens can be had alone."""
    return all(not is_state(name) and array.shape[TOKEN_AXIS] == cache.length for name, array in cache.arrays().items())


def rows_of(cache: Cache, rows: Sequence[int]) -> ArrayCache:
    """Some rows of a cache, in that order; a row may come twice."""
    return ArrayCache({name: array[list(rows)] for name, array in cache.arrays().items()}, cache.length)


def cut(cache: Cache, length: int) -> ArrayCache:
    """The first `length` slots of a cache that can be cut."""
    return ArrayCache({name: array[:, :, :length] for name, array in cache.arrays().items()}, length)


def moved_right(cache: Cache, shifts: Sequence[int], virtual: int = 0) -> ArrayCache:
    """A row for every shift: the tokens of a cache of one row that many slots later, over its end.

    Such a row goes on like a prompt with so much padding on its left, of which the first slots were run.

    Args:
        cache: of one row, which can be cut.
        shifts: slots, 0 or more.
        virtual: tokens that stay where they are.
    """
    moved = {name: _moved(array, shifts, virtual) for name, array in cache.arrays().items()}
    return ArrayCache(moved, cache.length)


def _moved(array: Array, shifts: Sequence[int], virtual: int) -> Array:
    slots = array.shape[TOKEN_AXIS] - virtual
    moved = np.zeros((len(shifts), *array.shape[1:]), dtype=array.dtype)
    moved[:, :, :virtual] = array[:, :, :virtual]
    for row, shift in enumerate(shifts):
        start = min(shift, slots)
        moved[row, :, virtual + start :] = array[0, :, virtual : virtual + slots - start]
    return moved
