"""Rounding to float16 by bits equals numpy: for every float16, and for float32 next to every tie."""

from __future__ import annotations

import numpy as np
import pytest

from llmconv.convert.adapters.low_rank_sum import round_to_float16, widen

ALL = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE = ALL[np.isfinite(ALL)]


@pytest.mark.parametrize("values", [ALL, FINITE, FINITE[:5].reshape(5, 1), FINITE[:0]])
def test_every_float16_is_widened_to_the_same_value(values: np.ndarray) -> None:
    wide = widen(values)
    assert wide.shape == values.shape and wide.dtype == np.float32
    np.testing.assert_array_equal(wide, values.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(wide), np.signbit(values))


@pytest.mark.parametrize("towards", [0.0, np.inf, -np.inf])
def test_ties_and_their_neighbors_are_rounded_as_numpy_does(towards: float) -> None:
    ordered = np.sort(FINITE.astype(np.float32))
    ties = ((ordered[1:].astype(np.float64) + ordered[:-1]) / 2).astype(np.float32)
    values = np.concatenate([ordered, ties, np.array([0.0, -0.0, 1e-45, -1e-30, 65519.99], np.float32)])
    values = np.nextafter(values, np.float32(towards)) if towards else values
    found = np.empty(len(values), np.float16)
    assert round_to_float16(found, values)
    np.testing.assert_array_equal(found.view(np.uint16), values.astype(np.float16).view(np.uint16))


def test_random_bits_are_rounded_as_numpy_does() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 32, 300_000, dtype=np.uint32).view(np.float32)
    values = values[np.abs(values) < 65520]
    found = np.empty(len(values), np.float16)
    assert round_to_float16(found, values)
    np.testing.assert_array_equal(found.view(np.uint16), values.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("value", [65520, -1e30, np.inf, np.nan])
def test_values_outside_the_range_of_float16_are_not_rounded(value: float) -> None:
    assert not round_to_float16(np.empty(2, np.float16), np.array([1, value], np.float32))
