"""The arithmetic: rounding to nearest even as torch does it, and bytes that do not depend on how work is divided."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmconv.convert.adapters.low_rank_sum import (
    LoraProduct,
    add_by_tiles,
    add_in_one_pass,
    add_products,
    compiled,
    round_into,
)
from llmconv.tensors import BY_NAME, Array, in_memory

F32 = BY_NAME["float32"]
needs_compiler = pytest.mark.skipif(not compiled, reason="llmconv was installed without a C compiler")

BITS = arrays.arrays(np.uint32, arrays.array_shapes(max_dims=2, max_side=9))


@pytest.mark.slow
@settings(deadline=None)
@given(bits=BITS)
def test_bfloat16_is_rounded_as_torch_rounds_any_bits(bits: Array) -> None:
    values = bits.view(np.float32)
    found = np.empty(values.shape, ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        round_into(found, values)
    expected = torch.from_numpy(values.copy()).bfloat16()
    same = torch.from_numpy(found.view(np.uint16).astype(np.int32)) == (expected.view(torch.int16).int() & 0xFFFF)
    assert (same | (expected.isnan() & torch.from_numpy(np.isnan(found)))).all()


@pytest.mark.parametrize("value", [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x00000001, 0x80008000])
def test_ties_limits_and_subnormals_are_rounded_to_even(value: int) -> None:
    values = np.array([value], np.uint32).view(np.float32)
    found = np.empty(1, ml_dtypes.bfloat16)
    round_into(found, values)
    assert found.view(np.int16)[0] == torch.from_numpy(values).bfloat16().view(torch.int16).item()


def random_case(rows: int, columns: int, rank: int, dtype: str = "bfloat16") -> tuple[Array, LoraProduct, Array]:
    """A base, a change, and their float64 sum."""
    generator = np.random.default_rng([rows, columns, rank])
    a, b = generator.standard_normal((rank, columns)), generator.standard_normal((rows, rank))
    a, b = a.astype(np.float32), b.astype(np.float32)
    base = generator.standard_normal((rows, columns)).astype(BY_NAME[dtype].numpy)
    change = LoraProduct(in_memory(a, F32), in_memory(b, F32), 0.25)
    return base, change, base.astype(np.float64) + 0.25 * b.astype(np.float64) @ a.astype(np.float64)


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 70), columns=st.integers(1, 300), rank=st.integers(1, 40))
def test_any_shape_equals_the_formula_in_float64(rows: int, columns: int, rank: int) -> None:
    base, change, exact = random_case(rows, columns, rank, "float32")
    found = add_products(in_memory(base, F32), [change], F32).read()
    assert np.array_equal(found, exact.astype(np.float32)) or np.allclose(found, exact, rtol=2e-7, atol=1e-15)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    rank=st.integers(1, 40),
    scale=st.sampled_from([1e-30, 1e-4, 0.01, 1.0, 1e3, 1e30]),
)
def test_bfloat16_is_the_float64_sum_in_every_element(rows: int, columns: int, rank: int, scale: float) -> None:
    base, change, _ = random_case(rows, columns, rank)
    change = LoraProduct(change.a, change.b, scale)
    exact = base.astype(np.float64) + scale * (change.b.read().astype(np.float64) @ change.a.read().astype(np.float64))
    found = add_products(in_memory(base, BY_NAME["bfloat16"]), [change], BY_NAME["bfloat16"]).read()
    assert np.array_equal(found, exact.astype(np.float32).astype(ml_dtypes.bfloat16))


def test_what_cancels_and_what_lies_in_the_middle_is_the_float64_sum() -> None:
    generator = np.random.default_rng(5)
    a, b = generator.standard_normal((8, 256)).astype(np.float32), generator.standard_normal((64, 8)).astype(np.float32)
    product = b.astype(np.float64) @ a.astype(np.float64)
    base = np.where(generator.random(product.shape) < 0.5, -product, 2.0**-8 - product).astype(ml_dtypes.bfloat16)
    change = LoraProduct(in_memory(a, F32), in_memory(b, F32), 1.0)
    found = add_products(in_memory(base, BY_NAME["bfloat16"]), [change], BY_NAME["bfloat16"]).read()
    exact = base.astype(np.float64) + product
    assert np.array_equal(found, exact.astype(np.float32).astype(ml_dtypes.bfloat16))


@pytest.mark.quick_rows("16-2048", "64-2048")
@pytest.mark.parametrize(("rank", "columns"), [(16, 2048), (64, 2048), (512, 4096), (4, 131_080)])
def test_large_products_made_in_parts_equal_the_formula(rank: int, columns: int) -> None:
    base, change, exact = random_case(19, columns, rank)
    found = add_products(in_memory(base, BY_NAME["bfloat16"]), [change], BY_NAME["bfloat16"]).read()
    assert np.array_equal(found, exact.astype(np.float32).astype(ml_dtypes.bfloat16))


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(1, 15).map(lambda part: part * 8), max_size=4, unique=True).map(sorted))
def test_the_bytes_do_not_depend_on_how_rows_are_divided(cuts: list[int]) -> None:
    base, change, _ = random_case(128, 96, 16)
    tensor = add_products(in_memory(base, BY_NAME["bfloat16"]), [change], BY_NAME["bfloat16"])
    edges = [0, *cuts, 128]
    parts = [tensor.rows(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
    assert np.concatenate(parts).tobytes() == tensor.read().tobytes()


@settings(deadline=None, max_examples=40)
@given(weight=st.integers(-64, 64).map(lambda value: value / 8))
def test_the_update_is_linear_in_the_weight(weight: float) -> None:
    base, change, _ = random_case(16, 24, 4, "float32")
    zero = in_memory(np.zeros_like(base), F32)
    scaled = LoraProduct(change.a, change.b, change.scale * weight)
    found = add_products(zero, [scaled], F32).read()
    np.testing.assert_allclose(found, weight * add_products(zero, [change], F32).read(), rtol=2e-7)


def test_a_change_and_its_negative_leave_the_base() -> None:
    base, change, _ = random_case(16, 24, 4)
    negative = LoraProduct(change.a, change.b, -change.scale)
    found = add_products(in_memory(base, BY_NAME["bfloat16"]), [change, negative], BY_NAME["bfloat16"]).read()
    np.testing.assert_allclose(found.astype(np.float32), base.astype(np.float32), rtol=2**-7, atol=1e-6)


def test_a_nan_of_the_base_stays_one_nan() -> None:
    base, change, _ = random_case(16, 24, 4)
    plain = add_products(in_memory(base, BY_NAME["bfloat16"]), [change], BY_NAME["bfloat16"]).read()
    base = base.copy()
    base[3, 5] = np.nan
    found = add_products(in_memory(base, BY_NAME["bfloat16"]), [change], BY_NAME["bfloat16"]).read()
    assert np.isnan(found[3, 5])
    assert (found != plain).sum() == 1


def both_sums(base: Array, change: LoraProduct) -> tuple[bool, Array, Array]:
    """Whether the compiled sum took the case, its result, and that of numpy."""
    one, other = np.empty_like(base), np.empty_like(base)
    left, right = change.factors(0, len(base))
    done = add_in_one_pass(one, base, left, right)
    add_by_tiles(other, base, left, right)
    return done, one, other


@pytest.mark.slow
@needs_compiler
@settings(deadline=None, max_examples=100)
@given(rows=st.integers(1, 70), columns=st.integers(1, 300), rank=st.integers(1, 40), transposed=st.booleans())
def test_the_compiled_sum_is_that_of_numpy(rows: int, columns: int, rank: int, transposed: bool) -> None:
    base, change, _ = random_case(rows, columns, rank)
    if transposed:
        base, change = base.T.copy(), LoraProduct(change.a, change.b, change.scale, transposed=True)
    done, one, other = both_sums(base, change)
    assert done
    assert one.tobytes() == other.tobytes()


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(scale=st.integers(-150, 60), spread=st.integers(0, 25), rank=st.integers(1, 70), seed=st.integers(0, 99))
def test_the_compiled_sum_is_that_of_numpy_for_any_sizes_of_numbers(
    scale: int, spread: int, rank: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    powers = [generator.integers(-spread, spread + 1, shape) for shape in ((9, rank), (rank, 40), (9, 40))]
    left, right, rows = (np.ldexp(generator.standard_normal(power.shape), power) for power in powers)
    base = np.ldexp(rows, scale // 2).astype(ml_dtypes.bfloat16)
    one, other = np.empty_like(base), np.empty_like(base)
    assert add_in_one_pass(one, base, np.ldexp(left, scale), right)
    add_by_tiles(other, base, np.ldexp(left, scale), right)
    assert one.tobytes() == other.tobytes()


@needs_compiler
def test_the_compiled_sum_settles_what_lies_in_the_middle() -> None:
    generator = np.random.default_rng(5)
    left, right = generator.standard_normal((64, 8)), generator.standard_normal((8, 256))
    product = left @ right
    middle = np.ldexp(1 + 2.0**-8, generator.integers(-9, 3, product.shape))
    base = (middle - product).astype(ml_dtypes.bfloat16)
    one, other = np.empty_like(base), np.empty_like(base)
    assert add_in_one_pass(one, base, left, right)
    add_by_tiles(other, base, left, right)
    assert one.tobytes() == other.tobytes()


@needs_compiler
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3.39e38])
def test_the_compiled_sum_leaves_odd_numbers_to_numpy(odd: float) -> None:
    base, change, _ = random_case(16, 24, 4)
    base = base.copy()
    base[7, 23] = odd
    scale = np.copysign(2e36, change.update(in_memory(base, BY_NAME["bfloat16"]), 0, 16)[7, 23])
    left, right = LoraProduct(change.a, change.b, scale).factors(0, len(base))
    assert not add_in_one_pass(np.empty_like(base), base, left, right)


@needs_compiler
@pytest.mark.parametrize("sizes", [(5, 6, 6, 6), (6, 5, 6, 6), (6, 6, 5, 6), (6, 6, 6, 5), (0, 0, 0, 6), (6, 6, 6, 0)])
def test_the_compiled_sum_refuses_arrays_that_do_not_fit(sizes: tuple[int, int, int, int]) -> None:
    target, source = (np.zeros(size * 6, np.uint16) for size in sizes[:2])
    left, right = (np.zeros(size * 2) for size in sizes[2:])
    assert compiled
    with pytest.raises(ValueError, match="do not fit"):
        compiled.add(target, source, left, right, 2)


@needs_compiler
@pytest.mark.parametrize("rank", [0, -1, 1 << 62])
def test_the_compiled_sum_refuses_a_senseless_rank(rank: int) -> None:
    assert compiled
    with pytest.raises(ValueError, match="do not fit"):
        compiled.add(np.zeros(4, np.uint16), np.zeros(4, np.uint16), np.zeros(4), np.zeros(4), rank)
