"""QuantizedTensor: the same codes in any order and orientation, a block of rows at a time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from llmconv.errors import InputRefused
from llmconv.export.quantization.block_rounding import BlockFormat
from llmconv.export.quantization.quantized_tensor import ELEMENTS, QuantizedTensor, Scratch
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory

MATRIX = np.random.default_rng(0).standard_normal((10, 80)).astype(np.float32)
FORM = BlockFormat()
FLOAT32 = BY_NAME["float32"]


def lazy(values: Array, dtype: str = "float32") -> LazyTensor:
    return in_memory(values.astype(BY_NAME[dtype].numpy), BY_NAME[dtype])


def whole(tensor: QuantizedTensor) -> dict[str, Array]:
    return {name: lazy.read() for name, lazy in tensor.tensors().items()}


def same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_shapes_are_those_of_the_operator() -> None:
    made = QuantizedTensor("w", lazy(MATRIX), FORM).tensors()
    assert {name: (tensor.dtype.name, tensor.shape) for name, tensor in made.items()} == {
        "w.codes": ("uint8", (10, 3, 16)),
        "w.zeros": ("uint8", (10, 2)),
        "w.scales": ("float32", (10, 3)),
    }


def test_symmetric_blocks_store_no_zero_points() -> None:
    assert list(whole(QuantizedTensor("w", lazy(MATRIX), BlockFormat(symmetric=True)))) == ["w.codes", "w.scales"]


def test_rows_can_be_read_in_any_order_and_again() -> None:
    expected, tensor = whole(QuantizedTensor("w", lazy(MATRIX), FORM)), QuantizedTensor("w", lazy(MATRIX), FORM)
    made = tensor.tensors()
    for start, stop in ((7, 10), (0, 3), (3, 7), (0, 10)):
        for name in ("w.scales", "w.codes", "w.zeros"):
            assert np.array_equal(made[name].rows(start, stop), expected[name][start:stop])


def test_scales_that_are_read_before_codes_hold_only_a_part_of_the_weights() -> None:
    """As the writer does, which reads ahead: the scales of a head of several GB may come first."""
    seen = []

    def rows(start: int, stop: int) -> Array:
        seen.append((stop - start) * 4096)
        return np.ones((stop - start, 4096), np.float32)

    made = QuantizedTensor("w", LazyTensor(FLOAT32, (1000, 4096), rows), FORM).tensors()
    assert made["w.scales"].read().shape == (1000, 128)
    assert sum(seen) == 1000 * 4096 and max(seen) <= ELEMENTS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_transposed_matrix_has_the_same_codes(dtype: str) -> None:
    turned = QuantizedTensor("w", lazy(np.ascontiguousarray(MATRIX.T), dtype), FORM, transposed=True)
    assert same(whole(turned), whole(QuantizedTensor("w", lazy(MATRIX, dtype), FORM)))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_stack_has_the_codes_of_each_of_its_matrices(transposed: bool) -> None:
    stack = np.stack([MATRIX, 2 * MATRIX, MATRIX[::-1]])
    stored = np.ascontiguousarray(stack.swapaxes(1, 2)) if transposed else stack
    made = whole(QuantizedTensor("w", lazy(stored), FORM, transposed=transposed))
    for number, matrix in enumerate(stack):
        one = whole(QuantizedTensor("w", lazy(np.ascontiguousarray(matrix)), FORM))
        assert same({name: array[number] for name, array in made.items()}, one)


def test_codes_are_of_the_scales_as_they_are_stored() -> None:
    made = whole(QuantizedTensor("w", lazy(MATRIX), FORM, scale_dtype=BY_NAME["float16"]))
    codes = np.stack([made["w.codes"] & 15, made["w.codes"] >> 4], -1).reshape(10, 3, 32)
    zeros = np.stack([made["w.zeros"] & 15, made["w.zeros"] >> 4], -1).reshape(10, 4)[:, :3, None]
    scales = made["w.scales"].astype(np.float32)[..., None]
    blocks = np.pad(MATRIX, ((0, 0), (0, 16))).reshape(10, 3, 32)
    assert np.array_equal(codes, np.clip(np.trunc(np.clip(blocks / scales + zeros, 0, 15) + 0.49999997), 0, 15))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_weight_that_is_no_number_is_refused_by_name(value: float) -> None:
    broken = MATRIX.copy()
    broken[3, 4] = value
    with pytest.raises(InputRefused, match="`w` contains infinite or NaN values"):
        whole(QuantizedTensor("w", lazy(broken), FORM))


def test_large_finite_weights_are_not_refused() -> None:
    assert np.isfinite(whole(QuantizedTensor("w", lazy(MATRIX * np.float32(1e37)), FORM))["w.scales"]).all()


def test_a_scale_beyond_float16_is_refused() -> None:
    tensor = QuantizedTensor("w", lazy(MATRIX * np.float32(1e6)), FORM, scale_dtype=BY_NAME["float16"])
    with pytest.raises(InputRefused, match="a scale of `w` is too large for float16"):
        whole(tensor)


def test_scales_that_vanish_in_float16_are_refused_with_a_hint() -> None:
    tensor = QuantizedTensor("w", lazy(MATRIX * np.float32(1e-7)), FORM, scale_dtype=BY_NAME["float16"])
    with pytest.raises(InputRefused, match="the scales of `w` are too small for float16") as error:
        whole(tensor)
    assert "`--precision bfloat16` or float32" in error.value.hint
    assert whole(QuantizedTensor("w", lazy(MATRIX * np.float32(1e-7)), FORM, scale_dtype=BY_NAME["bfloat16"]))


@pytest.mark.parametrize("form", [FORM, BlockFormat(bits=8, symmetric=True)])
def test_a_few_rows_may_vanish_among_larger_ones(form: BlockFormat) -> None:
    """As the rows of tokens that a model was never trained on."""
    few = MATRIX.copy()
    few[7:] *= np.float32(1e-20)
    assert whole(QuantizedTensor("w", lazy(few), form, scale_dtype=BY_NAME["float16"]))


def test_zeros_have_scales_of_any_type() -> None:
    assert not whole(QuantizedTensor("w", lazy(MATRIX * 0), FORM, scale_dtype=BY_NAME["float16"]))["w.scales"].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_range_beyond_float32_has_no_hint_of_a_wider_type(dtype: str) -> None:
    huge = MATRIX.copy()
    huge[3, 4:6] = 3.4e38, -3.4e38
    with pytest.raises(InputRefused, match=f"a scale of `w` is too large for {dtype}") as error:
        whole(QuantizedTensor("w", lazy(huge), FORM, scale_dtype=BY_NAME[dtype]))
    assert error.value.hint == "leave the weight as it is: `--quant-exclude`"


def test_codes_that_wait_in_a_file_have_their_room_on_the_disk(tmp_path: Path) -> None:
    """A page of a map that the disk has no room for ends the process."""
    with Scratch.next_to(tmp_path / "out") as scratch:
        made = scratch.codes((64,), 4096, FORM, FLOAT32)
        assert os.fstat(scratch._file.fileno()).st_blocks * 512 >= sum(part.nbytes for part in made.parts.values())
