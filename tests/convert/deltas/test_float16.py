"""float16 by bits gives what numpy gives: every float16, and float32 near every place where rounding turns."""

from __future__ import annotations

import numpy as np
import pytest

from llmconv.convert.deltas.float16 import round_to_halves, widened_halves

ALL = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE = ALL[np.isfinite(ALL)]


@pytest.mark.parametrize("values", [ALL, FINITE, FINITE[:5].reshape(5, 1), FINITE[:0]])
def test_every_half_is_widened_to_its_very_value(values: np.ndarray) -> None:
    wide = widened_halves(values)
    assert wide.shape == values.shape and wide.dtype == np.float32
    np.testing.assert_array_equal(wide, values.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(wide), np.signbit(values))


@pytest.mark.parametrize("towards", [0.0, np.inf, -np.inf])
def test_halves_the_ties_between_them_and_what_is_beside_are_rounded_as_numpy_does(towards: float) -> None:
    ordered = np.sort(FINITE.astype(np.float32))
    ties = ((ordered[1:].astype(np.float64) + ordered[:-1]) / 2).astype(np.float32)
    values = np.concatenate([ordered, ties, np.array([0.0, -0.0, 1e-45, -1e-30, 65519.99], np.float32)])
    values = np.nextafter(values, np.float32(towards)) if towards else values
    found = np.empty(len(values), np.float16)
    assert round_to_halves(found, values)
    np.testing.assert_array_equal(found.view(np.uint16), values.astype(np.float16).view(np.uint16))


def test_random_bits_are_rounded_as_numpy_does() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 32, 300_000, dtype=np.uint32).view(np.float32)
    values = values[np.abs(values) < 65520]
    found = np.empty(len(values), np.float16)
    assert round_to_halves(found, values)
    np.testing.assert_array_equal(found.view(np.uint16), values.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("value", [65520, -1e30, np.inf, np.nan])
def test_what_no_half_holds_is_left_to_others(value: float) -> None:
    assert not round_to_halves(np.empty(2, np.float16), np.array([1, value], np.float32))
