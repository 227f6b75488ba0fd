"""Lookup tables of half-precision graphs: rounded rows are regular, a row with another number is not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from llmconv.tensors import Array
from llmconv.verify.audit.decisions import odd_row


def sines(dtype: type, changed: float = 0.0) -> Array:
    """Sines of 64 positions at four frequencies; row 20 is changed. Those of bfloat16 are float32, as a graph's are."""
    table: Array = np.sin(np.arange(64)[:, None] * 10.0 ** -np.arange(4))
    table[20] += changed
    rounded: Array = table.astype(dtype)
    return rounded.astype(np.float32) if dtype is ml_dtypes.bfloat16 else rounded


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_rounded_table_is_regular(dtype: type) -> None:
    assert odd_row(sines(dtype)) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_row_that_is_more_than_rounded_is_found(dtype: type) -> None:
    assert odd_row(sines(dtype, changed=0.1)) in (19, 20, 21)
