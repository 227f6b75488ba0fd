"""The random numbers of torch's CPU generator without torch: some adapters store only a seed.

The generator is the Mersenne Twister, seeded like numpy's `RandomState` (`aten/src/ATen/core/MT19937RNGEngine.h`).
"""

from __future__ import annotations

import math

import numpy as np

from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array

LONG = (2**32 - 1) // 20
"""Size from which torch draws permutations in another way (`aten/src/ATen/native/TensorFactories.cpp`)."""


class TorchRandom:
    """The 32-bit numbers of torch's generator after `manual_seed(seed)`."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed & 0xFFFFFFFF)

    def take(self, count: int) -> Array:
        """The next `count` numbers, uint32."""
        return np.frombuffer(self._state.bytes(4 * count), "<u4")

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> Array:
        """A float32 array with the values of `tensor.uniform_(low, high)` (`at::uniform_real_distribution`)."""
        fractions = (self.take(math.prod(shape)) & 0xFFFFFF) * 2.0**-24
        start, width = np.float32(low), np.float32(high) - np.float32(low)
        return (fractions * float(width) + float(start)).astype(np.float32).reshape(shape)


def first_of_permutation(size: int, count: int, seed: int) -> Array:
    """The first `count` of `torch.randperm(size)` by this seed, int64; UnsupportedInput if `size` is `LONG` or more."""
    if size >= LONG:
        raise UnsupportedInput(
            f"unsupported: a seeded permutation of {size:,} elements",
            hint="merge it with PEFT's `merge_and_unload`",
        )
    draws = TorchRandom(seed).take(count) % (size - np.arange(count, dtype=np.int64))
    moved: dict[int, int] = {}
    result = np.empty(count, np.int64)
    for step, draw in enumerate(draws.tolist()):
        result[step] = moved.get(step + draw, step + draw)
        moved[step + draw] = moved.pop(step, step)
    return result
