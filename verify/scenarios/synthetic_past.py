"""SyntheticPast: a past that no model computed, so that thousands of tokens cost no more than the memory of their cache.

A window of 4,096 tokens is too long to be crossed by running so many tokens in float64. But a graph and the eager model
continue whatever cache they are given: random numbers, the same for both, of which the tokens at the edge of the window
are loud. Numbers are multiples of 1/16 of few bits, exact in every floating-point type.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmconv.runtime.array_cache import SLOT_AXIS
from llmconv.runtime.cache_names import is_state
from llmconv.tensors import Array

LARGEST = 24
STEP = 1 / 16
LOUDER = 32
"""Values of loud tokens are so many times larger: one of thousands still shows."""

MIB = 1 << 20


@dataclass(frozen=True)
class SyntheticPast:
    """A cache of random keys and values; states are zero, as those of an empty past. See `Cache`.

    Attributes:
        shapes: of a cache of one sequence and one token, by the names of the graphs' outputs.
        rows: sequences.
        length: tokens in it.
        loud: first loud slot, and the one after the last.
        seed: of the numbers.
    """

    shapes: Mapping[str, tuple[int, ...]]
    rows: int
    length: int
    loud: tuple[int, int]
    seed: int

    def arrays(self) -> dict[str, Array]:
        """By name, float32; made anew each time, so that nothing is held between two calls."""
        return {name: self._array(name, shape) for name, shape in self.shapes.items()}

    def _array(self, name: str, shape: tuple[int, ...]) -> Array:
        whole = [self.rows, *shape[1:]]
        if is_state(name):
            return np.zeros(whole, dtype=np.float32)
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        whole[SLOT_AXIS] = self.length
        array: Array = rng.integers(-LARGEST, LARGEST + 1, whole, dtype=np.int8).astype(np.float32)
        array *= STEP
        if name.endswith(".value"):
            array[:, :, slice(*self.loud)] *= LOUDER
        return array

    def kept_by(self, arrays: Mapping[str, Array]) -> bool:
        """Whether a cache that continues this one still begins with it, bit by bit; states change by design."""
        return all(
            name not in arrays or np.array_equal(arrays[name][:, :, : self.length], self._array(name, shape))
            for name, shape in self.shapes.items()
            if not is_state(name)
        )


def elements_per_token(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers that one more token of one sequence adds to a cache."""
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if not is_state(name))
