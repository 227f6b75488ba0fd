"""Constants of half-precision graphs are replaced by the numbers that they are roundings of."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from llmconv.tensors import Array
from llmconv.verify.comparison.half_precision import KnownConstants

FREQUENCIES = (10000.0 ** -(np.arange(8) / 8)).astype(np.float32)
KNOWN = KnownConstants.of({"hidden_size": 96, "num_attention_heads": 4, "rms_norm_eps": 1e-6}, [(FREQUENCIES, 1.0)])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("number", [0.044715, 1e-6, 24**-0.5, 96**0.5, 1.702])
def test_a_number_of_the_model_is_restored_from_its_rounding(number: float, dtype: type) -> None:
    assert KNOWN.restored(np.array(number, dtype=dtype)) == np.float32(number)


@pytest.mark.parametrize("number", [0.0, 1.0, -0.5, 3.0, 0.0123, -65504.0])
def test_other_numbers_do_not_change(number: float) -> None:
    value = np.array([number], dtype=np.float16)
    assert KNOWN.restored(value) == value.astype(np.float32)


def test_weights_are_not_treated_as_constants() -> None:
    values = np.full(64, 0.044715, dtype=np.float16)
    assert np.array_equal(KNOWN.restored(values), values.astype(np.float32))


def table(positions: int = 40) -> Array:
    """Cosines by position, float32."""
    cosines: Array = np.cos(np.arange(positions, dtype=np.float32)[:, None] * FREQUENCIES)
    return cosines


@pytest.mark.parametrize("times", [1, 2])
def test_a_rotary_table_is_restored_from_its_rounding(times: int) -> None:
    wide = np.tile(table(), times)
    assert np.array_equal(KNOWN.restored(wide.astype(np.float16)), wide)


def test_wrong_values_in_a_table_stay_wrong() -> None:
    rounded = table(400).astype(np.float16)
    rounded[7, 3] += np.float16(0.1)
    found = KNOWN.restored(rounded)
    assert found[7, 3] == np.float32(rounded[7, 3])
    assert np.array_equal(found[8:], table(400)[8:])


def test_a_table_of_angles_in_half_precision_stays_wrong() -> None:
    angles = np.arange(40, dtype=np.float32)[:, None] * FREQUENCIES.astype(np.float16).astype(np.float32)
    rounded = np.cos(angles).astype(np.float16)
    assert np.array_equal(KNOWN.restored(rounded), rounded.astype(np.float32))
