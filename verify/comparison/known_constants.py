"""KnownConstants: numbers of the model that the constants of a half-precision graph may be roundings of.

The eager model multiplies a float16 tensor by 0.044715 and rounds the product; a graph stores that number as float16
and so rounds it, too. This is invisible in half precision, but a difference in a float32 copy of the graph. So the copy
uses the exact number if it is one of the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import frexp, isfinite, log2, pi, sqrt
from typing import Any

import ml_dtypes
import numpy as np

from llmconv.tensors import Array
from llmconv.verify.results.sigma import ULPS

FEW = 8
"""Maximum number of elements of an initializer that is treated as constants of a formula."""

EQUAL = 0.99
"""Minimum share of equal elements of a table, up to one unit in the last place of 1; others are not replaced."""

PLAIN_BITS = 4
"""Numbers with at most this many significant bits are exact: 0.5, 3, 10."""

OF_FORMULAS = (
    *(0.044715, sqrt(2 / pi), sqrt(2), 1 / sqrt(2), 1.702, 0.7978845608, 0.3989422804, 1 / log2(np.e), log2(np.e)),
    *(0.7978845608 * 0.044715, 1 / 3, 2 / 3, 1 / 6),
)
"""Constants of activation functions."""


@dataclass(frozen=True)
class KnownConstants:
    """Numbers with which a model computes, other than its weights.

    Attributes:
        numbers: constants of activation functions, and numbers of its config with their roots and reciprocals.
        frequencies: rotary frequencies, float32 `[head_dim / 2]`, each with the factor of cosine and sine.
    """

    numbers: Sequence[float] = ()
    frequencies: Sequence[tuple[Array, float]] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any], frequencies: Sequence[tuple[Array, float]]) -> KnownConstants:
        """The constants of a model with the given `config.json` and rotary frequencies."""
        return cls(_known_numbers(config), frequencies)

    def restored(self, values: Array) -> Array:
        """Half-precision values in float32, replaced by the known numbers that they are roundings of.

        Args:
            values: float16 or bfloat16, any shape: a few numbers, a rotary table, or other values, which are only cast.
        """
        if values.size <= FEW:
            return _restored(values, self.numbers)
        wide = values.astype(np.float32)
        for table in self._tables(values.shape):
            off = np.abs(wide - table) > ULPS[values.dtype.name]
            if off.mean() < 1 - EQUAL:
                return np.where(off, wide, table)
        return wide

    def is_exact(self, values: Array) -> bool:
        """Whether `restored` gives the numbers that the values are roundings of; else they are a table of others."""
        if values.size <= FEW or bool((values == values.ravel()[0]).all()):
            return True
        wide = values.astype(np.float32)
        return any((np.abs(wide - one) <= ULPS[values.dtype.name]).mean() > EQUAL for one in self._tables(values.shape))

    def is_rotary(self, shape: tuple[int, ...]) -> bool:
        """Whether a table of that shape may contain cosines or sines by position."""
        widths = {len(frequencies) * times for frequencies, _ in self.frequencies for times in (1, 2)}
        return len(shape) == 2 and shape[1] in widths

    def _tables(self, shape: tuple[int, ...]) -> Iterator[Array]:
        """Possible tables of that shape: cosines and sines by position, float32."""
        for frequencies, factor in self.frequencies if self.is_rotary(shape) else ():
            if shape[1] % len(frequencies) == 0:
                times = shape[1] // len(frequencies)
                angles = np.arange(shape[0], dtype=np.float32)[:, None] * np.tile(frequencies, times)
                yield from (function(angles) * np.float32(factor) for function in (np.cos, np.sin))


def _known_numbers(config: Mapping[str, Any]) -> list[float]:
    """See `KnownConstants.numbers`."""
    numbers = [value for value in _numbers(config) if 0 < abs(value) < 1e9]
    per_head = _head_size(config)
    found = list(OF_FORMULAS)
    for value in [*numbers, *([per_head] if per_head else [])]:
        size = abs(value)
        found += [value, -value, 1 / value, sqrt(size), 1 / sqrt(size), size**0.25, size**-0.25]
    return found


def _head_size(config: Mapping[str, Any]) -> float | None:
    width = config.get("hidden_size") or config.get("n_embd")
    heads = config.get("num_attention_heads") or config.get("n_head")
    return width / heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in a JSON value."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value):
        yield float(value)
    inner: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        yield from _numbers(one)


def _restored(values: Array, known: Sequence[float]) -> Array:
    """The first known number with each value as its rounding; exact values are not replaced."""
    wide = values.astype(np.float32)
    candidates = np.array(known, dtype=np.float64)
    with np.errstate(over="ignore"):
        rounded = candidates.astype(values.dtype).astype(np.float32)
    for at, value in enumerate(wide.flat):
        matching = candidates[rounded == value]
        if matching.size and not _is_exact(float(value)) and float(value) not in matching:
            wide.flat[at] = np.float32(matching[0])
    return wide


def hiding(values: Array) -> Array:
    """Numbers of a mask in float32: the smallest number of the dtype, which hides a key, becomes that of float32."""
    wide = values.astype(np.float32)
    wide[values == ml_dtypes.finfo(values.dtype).min] = np.finfo(np.float32).min
    return wide


def _is_exact(value: float) -> bool:
    return float(frexp(value)[0] * 2**PLAIN_BITS).is_integer()
