"""ColumnTensor: int8 codes [K, N] in any orientation, a panel at a time."""

from __future__ import annotations

import numpy as np
import pytest

from llmconv.errors import InputRefused
from llmconv.export.quantization.quantized_tensor import ColumnTensor
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory

MATRIX = np.random.default_rng(0).standard_normal((10, 80)).astype(np.float32)


def lazy(values: Array, dtype: str = "float32") -> LazyTensor:
    return in_memory(values.astype(BY_NAME[dtype].numpy), BY_NAME[dtype])


def whole(tensor: ColumnTensor) -> dict[str, Array]:
    return {name: lazy.read() for name, lazy in tensor.tensors().items()}


def test_shapes_are_those_of_the_operator() -> None:
    made = ColumnTensor("w", lazy(MATRIX)).tensors()
    assert {name: (tensor.dtype.name, tensor.shape) for name, tensor in made.items()} == {
        "w.codes": ("int8", (80, 10)),
        "w.scales": ("float32", (10,)),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_code_is_the_nearest_and_the_largest_weight_has_the_largest(dtype: str, transposed: bool) -> None:
    given = MATRIX.astype(BY_NAME[dtype].numpy)
    made = whole(ColumnTensor("w", lazy(given.T if transposed else given, dtype), transposed=transposed))
    exact = given.astype(np.float64) / made["w.scales"][:, None]
    assert (np.abs(exact.T - made["w.codes"]) <= 0.5 + 1e-6).all()
    assert (np.abs(made["w.codes"]).max(axis=0) == 127).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_stack_has_the_codes_of_each_of_its_matrices(transposed: bool) -> None:
    stack = np.stack([MATRIX, 2 * MATRIX, MATRIX[::-1]])
    stored = np.ascontiguousarray(stack.swapaxes(1, 2)) if transposed else stack
    made = whole(ColumnTensor("w", lazy(stored), transposed=transposed))
    for number, matrix in enumerate(stack):
        one = whole(ColumnTensor("w", lazy(np.ascontiguousarray(matrix))))
        assert all(np.array_equal(array[number], one[name]) for name, array in made.items())


def test_rows_of_codes_can_be_read_in_any_order() -> None:
    expected, made = whole(ColumnTensor("w", lazy(MATRIX))), ColumnTensor("w", lazy(MATRIX)).tensors()
    for start, stop in ((70, 80), (0, 3), (3, 70)):
        assert np.array_equal(made["w.codes"].rows(start, stop), expected["w.codes"][start:stop])


def test_an_output_of_zeros_has_codes_of_zero() -> None:
    made = whole(ColumnTensor("w", lazy(np.zeros((3, 32), np.float32))))
    assert not made["w.codes"].any() and (made["w.scales"] == 1).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_weight_that_is_no_number_is_refused_by_name(value: float) -> None:
    broken = MATRIX.copy()
    broken[3, 4] = value
    with pytest.raises(InputRefused, match="`w` contains infinite or NaN values"):
        whole(ColumnTensor("w", lazy(broken)))
