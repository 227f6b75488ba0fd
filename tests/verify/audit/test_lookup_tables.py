"""Lookup tables of half-precision graphs: rounded rows are regular, a row with another number is not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from llmconv.tensors import Array
from llmconv.verify.audit.lookups import odd_row
from llmconv.verify.audit.state import ConstantValue


def sines(dtype: type, changed: float = 0.0) -> ConstantValue:
    """Sines of 64 positions at four frequencies; row 20 is changed."""
    table: Array = np.sin(np.arange(64)[:, None] * 10.0 ** -np.arange(4))
    table[20] += changed
    return ConstantValue(table.astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_rounded_table_is_regular(dtype: type) -> None:
    table = sines(dtype)
    assert odd_row(table.array, table.step) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_row_that_is_more_than_rounded_is_found(dtype: type) -> None:
    table = sines(dtype, changed=0.1)
    assert odd_row(table.array, table.step) in (19, 20, 21)


def test_constants_of_bfloat16_are_numbers() -> None:
    constant = ConstantValue(np.full(3, 2.5, ml_dtypes.bfloat16))
    assert (constant.number, constant.step) == (2.5, 2.0**-7)
    assert constant.array.dtype == np.float32
