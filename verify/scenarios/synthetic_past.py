"""SyntheticPast: a cache of random numbers, which makes pasts of thousands of tokens cheap.

Running 4,096 tokens in float64 to cross a window takes too long. But a graph and the eager model continue any cache:
here the same random numbers for both, with large values at the edge of the window. All numbers are small multiples of
1/16, which are exact in every floating-point type.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmconv.runtime.array_cache import TOKEN_AXIS
from llmconv.runtime.cache_names import is_state
from llmconv.tensors import Array

LARGEST = 24
STEP = 1 / 16
LOUDER = 32
"""Factor of the values of the loud tokens, so that one token among thousands is visible."""

MIB = 1 << 20


@dataclass(frozen=True)
class SyntheticPast:
    """A `Cache` of random keys and values; states are zero, as in an empty past.

    Attributes:
        shapes: cache shapes for one sequence and one token, by output name.
        rows: number of sequences.
        length: number of tokens.
        loud: first slot with large values, and the slot after the last.
        seed: of the random numbers.
    """

    shapes: Mapping[str, tuple[int, ...]]
    rows: int
    length: int
    loud: tuple[int, int]
    seed: int

    @property
    def key(self) -> bytes:
        """A digest of its description."""
        return hashlib.sha256(repr(self).encode()).digest()

    def arrays(self) -> dict[str, Array]:
        """Arrays by name, float32; generated anew on each call, so that no memory is held between two calls."""
        return {name: self._array(name, shape) for name, shape in self.shapes.items()}

    def _array(self, name: str, shape: tuple[int, ...]) -> Array:
        whole = [self.rows, *shape[1:]]
        if is_state(name):
            return np.zeros(whole, dtype=np.float32)
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        whole[TOKEN_AXIS] = self.length
        array: Array = rng.integers(-LARGEST, LARGEST + 1, whole, dtype=np.int8).astype(np.float32)
        array *= STEP
        if name.endswith(".value"):
            array[:, :, slice(*self.loud)] *= LOUDER
        return array

    def kept_by(self, arrays: Mapping[str, Array]) -> bool:
        """Whether a later cache begins with exactly this one; states are not compared, since they change."""
        return all(
            name not in arrays or np.array_equal(arrays[name][:, :, : self.length], self._array(name, shape))
            for name, shape in self.shapes.items()
            if not is_state(name)
        )


def elements_per_token(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Elements that one token of one sequence adds to a cache."""
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if not is_state(name))
