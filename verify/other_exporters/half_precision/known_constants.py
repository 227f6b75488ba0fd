"""Constants of half-precision graphs: which number of the model one is the rounding of.

The eager model multiplies a float16 tensor by the number 0.044715 and rounds the product; a graph has to hold that
number as float16 and rounds it too. In half precision nobody sees it, in a float32 copy of the graph it would be a
difference. So the copy takes the number that was rounded, where it is one that the model knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import frexp, isfinite, log2, pi, sqrt
from typing import Any

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.results.measure import ULPS

FEW = 8
"""Elements up to which an initializer is taken for numbers of a formula."""

EQUAL = 0.99
"""Share of a table that must be equal, up to one unit in the last place of 1; what is not stays as it is."""

PLAIN_BITS = 4
"""A number of so few significant bits stands for itself: 0.5, 3, 10."""

OF_FORMULAS = (
    *(0.044715, sqrt(2 / pi), sqrt(2), 1 / sqrt(2), 1.702, 0.7978845608, 0.3989422804, 1 / log2(np.e), log2(np.e)),
    *(0.7978845608 * 0.044715, 1 / 3, 2 / 3, 1 / 6),
)
"""What activations are made of."""


@dataclass(frozen=True)
class Known:
    """What a model computes with, beside its weights.

    Attributes:
        numbers: those of its activations, and those of its config with their roots and reciprocals.
        frequencies: of its rotary embeddings, float32 `[head_dim / 2]`, each with the factor of cosine and sine.
    """

    numbers: Sequence[float] = ()
    frequencies: Sequence[tuple[Array, float]] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any], frequencies: Sequence[tuple[Array, float]]) -> Known:
        """Of the model with that `config.json`."""
        return cls(_known_numbers(config), frequencies)

    def restored(self, values: Array) -> Array:
        """Half-precision numbers in float32, each as the known number that it is the rounding of.

        Args:
            values: float16 or bfloat16, any shape: a few numbers, a rotary table, or what is widened as it is.
        """
        if values.size <= FEW:
            return _restored(values, self.numbers)
        wide = values.astype(np.float32)
        for table in self._tables(values.shape):
            off = np.abs(wide - table) > ULPS[values.dtype.name]
            if off.mean() < 1 - EQUAL:
                return np.where(off, wide, table)
        return wide

    def is_rotary(self, shape: tuple[int, ...]) -> bool:
        """Whether a table of that shape may be cosines or sines by position."""
        widths = {len(frequencies) * times for frequencies, _ in self.frequencies for times in (1, 2)}
        return len(shape) == 2 and shape[1] in widths

    def _tables(self, shape: tuple[int, ...]) -> Iterator[Array]:
        """Cosines and sines by position, float32, that such a table may be."""
        for frequencies, factor in self.frequencies if self.is_rotary(shape) else ():
            if shape[1] % len(frequencies) == 0:
                times = shape[1] // len(frequencies)
                angles = np.arange(shape[0], dtype=np.float32)[:, None] * np.tile(frequencies, times)
                yield from (function(angles) * np.float32(factor) for function in (np.cos, np.sin))


def _known_numbers(config: Mapping[str, Any]) -> list[float]:
    """See `Known.numbers`."""
    given = [value for value in _numbers(config) if 0 < abs(value) < 1e9]
    per_head = _head_size(config)
    found = list(OF_FORMULAS)
    for value in [*given, *([per_head] if per_head else [])]:
        size = abs(value)
        found += [value, -value, 1 / value, sqrt(size), 1 / sqrt(size), size**0.25, size**-0.25]
    return found


def _head_size(config: Mapping[str, Any]) -> float | None:
    width = config.get("hidden_size") or config.get("n_embd")
    heads = config.get("num_attention_heads") or config.get("n_head")
    return width / heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _numbers(value: Any) -> Iterator[float]:
    """All numbers inside."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value):
        yield float(value)
    inner: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        yield from _numbers(one)


def _restored(values: Array, known: Sequence[float]) -> Array:
    """Of several numbers that a value may be the rounding of the first; one that stands for itself stays."""
    wide = values.astype(np.float32)
    candidates = np.array(known, dtype=np.float64)
    with np.errstate(over="ignore"):
        rounded = candidates.astype(values.dtype).astype(np.float32)
    for at, value in enumerate(wide.flat):
        matching = candidates[rounded == value]
        if matching.size and not _is_plain(float(value)) and float(value) not in matching:
            wide.flat[at] = np.float32(matching[0])
    return wide


def _is_plain(value: float) -> bool:
    return float(frexp(value)[0] * 2**PLAIN_BITS).is_integer()
