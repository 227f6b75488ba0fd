"""Rounding to codes: onnxruntime's own bits without a search, less loss with one, and numpy as the compiled code."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnxruntime.capi._pybind_state import quantize_matmul_4bits, quantize_matmul_8bits

from llmconv.export.quantization import block_rounding
from llmconv.export.quantization.block_rounding import (
    NONE,
    SIZES,
    BlockFormat,
    block_codes,
    block_scales,
    compiled,
    pack,
)
from llmconv.tensors import Array

FORMATS = [
    BlockFormat(bits, size, symmetric, search)
    for bits in (4, 8)
    for size in SIZES
    for symmetric in (False, True)
    for search in (False, True)
]


def weights(blocks: int, size: int, *, rounded: bool = False) -> Array:
    """Seeded weights with heavy tails; the first blocks are extreme ones."""
    made = np.random.default_rng(size).standard_t(4, (blocks, size)).astype(np.float32) * np.float32(0.02)
    made[0], made[1], made[2], made[3], made[4] = 0, 1e-38, 3, -3, 1e30
    made[5], made[6, 1:] = np.abs(made[5]), 0
    return made.astype(ml_dtypes.bfloat16).astype(np.float32) if rounded else made


def decoded(packed: Array, scales: Array, zeros: Array, form: BlockFormat) -> Array:
    """(code - zero point) * scale."""
    codes = packed
    if form.bits == 4:
        codes = np.empty((len(packed), form.size), np.uint8)
        codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    wide: Array = (codes.astype(np.float64) - zeros[:, None]) * scales[:, None].astype(np.float64)
    return wide


def loss(given: Array, form: BlockFormat, importance: Array = NONE) -> float:
    scales, zeros = block_scales(given, form, importance)
    errors = (decoded(block_codes(given, scales, zeros, form), scales, zeros, form) - given) ** 2
    if importance.size:
        errors *= np.tile(importance.reshape(-1, form.size), (len(given) * form.size // importance.size, 1))
    return float(errors.sum())


@pytest.mark.skipif(compiled is None, reason="llmconv was installed without a C compiler")
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_numpy_makes_the_bits_of_the_compiled_code(
    form: BlockFormat, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = np.concatenate([weights(100, form.size), weights(68, form.size, rounded=True)])
    importance = np.random.default_rng(1).random(4 * form.size).astype(np.float32) if weighted else NONE
    made = [*block_scales(given, form, importance)]
    made.append(block_codes(given, made[0], made[1], form))
    monkeypatch.setattr(block_rounding, "compiled", None)
    again = [*block_scales(given, form, importance)]
    again.append(block_codes(given, again[0], again[1], form))
    assert all(np.array_equal(one, other) for one, other in zip(made, again, strict=True))


@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", [form for form in FORMATS if not form.search], ids=str)
def test_without_a_search_the_bits_are_those_of_onnxruntime(form: BlockFormat, rounded: bool) -> None:
    rows, blocks = 24, 4
    given = weights(rows * blocks, form.size, rounded=rounded)[:, :]
    given[4] = 0.5  # its own of 1e30 becomes infinite there
    given[1] = 0.25
    codes = np.zeros((rows, blocks, form.block_bytes), np.uint8)
    scales = np.zeros(rows * blocks, np.float32)
    zeros = np.zeros(rows * form.zero_bytes(blocks * form.size), np.uint8)
    quantize = {4: quantize_matmul_4bits, 8: quantize_matmul_8bits}[form.bits]
    matrix = np.ascontiguousarray(given.reshape(rows, -1).T)
    quantize(codes, matrix, scales, zeros, form.size, rows, blocks * form.size, form.symmetric)
    found, points = block_scales(given, form)
    used = given.any(axis=1)  # onnxruntime's codes of a block of zeros are zeros times nothing
    assert np.array_equal(found, scales)
    assert np.array_equal(block_codes(given, found, points, form)[used], codes.reshape(len(given), -1)[used])
    if not form.symmetric:
        assert np.array_equal(pack(points.reshape(rows, blocks), form.bits)[1:], zeros.reshape(rows, -1)[1:])


@pytest.mark.parametrize("form", [form for form in FORMATS if form.search and form.bits == 4], ids=str)
def test_a_search_loses_less_than_extreme_values(form: BlockFormat) -> None:
    given = weights(2000, form.size)[10:]
    plain = BlockFormat(form.bits, form.size, form.symmetric, search=False)
    assert loss(given, form) < 0.97 * loss(given, plain)


def test_important_columns_are_rounded_with_less_loss() -> None:
    given, form = weights(2000, 32)[16:], BlockFormat()
    importance = np.random.default_rng(0).lognormal(sigma=2, size=64).astype(np.float32)
    scales, zeros = block_scales(given, form)
    alike = (decoded(block_codes(given, scales, zeros, form), scales, zeros, form) - given) ** 2
    alike *= np.tile(importance.reshape(-1, 32), (len(given) // 2, 1))
    assert loss(given, form, importance) < 0.85 * alike.sum()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_weight_is_at_most_half_a_step_from_its_code_unless_it_is_cut(form: BlockFormat) -> None:
    given = weights(200, form.size)[5:]
    scales, zeros = block_scales(given, form)
    found = decoded(block_codes(given, scales, zeros, form), scales, zeros, form)
    points, steps = zeros.astype(float), scales.astype(float)
    low, high = -points * steps, (form.largest - points) * steps
    inside = np.clip(given, np.minimum(low, high)[:, None], np.maximum(low, high)[:, None])
    assert (np.abs(found - inside) <= 0.5001 * np.abs(scales)[:, None] + 1e-12).all()


def test_zeros_stay_zeros() -> None:
    form = BlockFormat()
    scales, zeros = block_scales(np.zeros((3, 32), np.float32), form)
    assert not decoded(block_codes(np.zeros((3, 32), np.float32), scales, zeros, form), scales, zeros, form).any()


def test_no_blocks_have_no_scales() -> None:
    scales, zeros = block_scales(np.zeros((0, 32), np.float32), BlockFormat())
    assert scales.shape == zeros.shape == (0,)


@pytest.mark.skipif(compiled is None, reason="llmconv was installed without a C compiler")
def test_the_compiled_code_refuses_arrays_of_other_sizes() -> None:
    assert compiled is not None
    block, scales, zeros = np.zeros((2, 32), np.float32), np.zeros(2, np.float32), np.zeros(2, np.uint8)
    given: list[tuple[str, tuple[Any, ...]]] = [
        ("scales", (block[:1], NONE, scales, zeros, 32, 4, False, True)),
        ("scales", (block, NONE, scales, zeros, 512, 4, False, True)),
        ("scales", (block, np.ones(33, np.float32), scales, zeros, 32, 4, False, True)),
        ("scales", (block, NONE, scales, zeros, 32, 3, False, True)),
        ("codes", (block, scales, zeros, np.zeros((2, 32), np.uint8), 32, 4)),
    ]
    for name, wrong in given:
        with pytest.raises(ValueError, match="do not fit"):
            getattr(compiled, name)(*wrong)
