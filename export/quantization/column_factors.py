"""Factors of the columns of a matrix: it is multiplied with them before it is rounded; see `quantization.smoothing`."""

from __future__ import annotations

from llmconv.export.quantization.quantized_tensor import widened
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory

FLOAT32 = BY_NAME["float32"]
SMOOTHING = ".smoothing"
"""Suffix of the names of factors."""


def multiplied(weight: LazyTensor, factors: Array) -> LazyTensor:
    """A matrix in float32, multiplied block by block of its rows: [N, K] with factors [K], or [K, N] with [K, 1]."""

    def rows(start: int, stop: int) -> Array:
        mine = factors[start:stop] if factors.ndim > 1 else factors
        product: Array = widened(weight.rows(start, stop)) * mine
        return product

    return LazyTensor(FLOAT32, weight.shape, rows)


def stored_factors(name: str, factors: Array) -> dict[str, LazyTensor]:
    """Factors of a tensor by the name that they are stored under."""
    return {name + SMOOTHING: in_memory(factors, FLOAT32)}
