"""Scales of an export fit what `verify` demands of them, whatever the weights; coarse ones do not."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from llmconv.export.quantization.block_rounding import NONE, BlockFormat, block_scales, block_values
from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.expected_scales import Blocks, scale_problem

COUNT = 500
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]

WEIGHTS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(1.5, shape),
    "of many sizes": lambda rng, shape: np.exp(4 * rng.standard_normal(shape)) * rng.choice([-1, 1], shape),
    "negative": lambda rng, shape: -np.abs(rng.standard_t(2, shape)),
    "far from zero": lambda rng, shape: rng.standard_normal(shape) + rng.uniform(-5, 5, (shape[0], 1)),
    "mostly zero": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.05),
    "of 4 bits": lambda rng, shape: rng.integers(-8, 8, shape) * rng.uniform(0.1, 1, (shape[0], 1)),
    "halves of codes": lambda rng, shape: rng.integers(-15, 16, shape) / 2,
    "bfloat16": lambda rng, shape: rng.standard_normal(shape).astype(ml_dtypes.bfloat16),
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 10 ** rng.uniform(-33, -10, (shape[0], 1)),
    "huge": lambda rng, shape: rng.standard_normal(shape) * 10 ** rng.uniform(10, 36, (shape[0], 1)),
}
IMPORTANCES: dict[str, Draw] = {
    "squares": lambda rng, shape: rng.standard_normal(shape) ** 2,
    "of many sizes": lambda rng, shape: np.exp(5 * rng.standard_normal(shape)),
    "one column": lambda rng, shape: np.where(np.arange(shape[1]) == rng.integers(shape[1]), 1, 1e-6)[None],
    "a third of the columns": lambda rng, shape: (np.arange(shape[1]) % 3 == 0)[None],
}
FORMS = {
    "int4": BlockFormat(),
    "int4, blocks of 128": BlockFormat(size=128),
    "int4, symmetric": BlockFormat(symmetric=True),
    "rtn": BlockFormat(search=False),
    "rtn, symmetric": BlockFormat(symmetric=True, search=False),
    "int8": BlockFormat(bits=8, symmetric=True, search=False),
}


def drawn(draw: Draw, form: BlockFormat, seed: int = 0) -> Array:
    return draw(np.random.default_rng(seed), (COUNT, form.size)).astype(np.float32)


def blocks(weights: Array, scales: Array, zeros: Array, form: BlockFormat) -> Blocks:
    """Blocks of one row each, with the nearest codes."""
    values = block_values(weights, scales.astype(np.float32), zeros, form).astype(np.float64)
    grids = scales.astype(np.float64)[:, None], zeros.astype(np.float64)[:, None]
    return Blocks(weights[:, None], *grids, lambda: values, form.largest, scales.dtype, form.symmetric)


def problem(found: Blocks, form: BlockFormat, *, weighted: bool = False) -> str:
    return scale_problem(found, 0, not form.search, weighted=weighted)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("form", FORMS)
def test_scales_of_an_export_fit(form: str, weights: str, dtype: type) -> None:
    made, values = FORMS[form], drawn(WEIGHTS[weights], FORMS[form])
    scales, zeros = block_scales(values, made)
    assert problem(blocks(values, scales.astype(dtype), zeros, made), made) == ""


@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("form", [name for name in FORMS if FORMS[name].search])
def test_scales_of_a_calibrated_export_fit(form: str, weights: str, importance: str) -> None:
    made, values = FORMS[form], drawn(WEIGHTS[weights], FORMS[form])
    factors = IMPORTANCES[importance](np.random.default_rng(1), (1, made.size)).astype(np.float32)
    scales, zeros = block_scales(values, made, factors[0])
    assert problem(blocks(values, scales, zeros, made), made, weighted=True) == ""


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_scale_that_erases_a_block_is_named(form: str, weighted: bool) -> None:
    made, values = FORMS[form], drawn(WEIGHTS["normal"], FORMS[form])
    scales, zeros = block_scales(values, made)
    scales[7] = 2.2 * np.abs(values[7]).max()
    found = problem(blocks(values, scales, zeros, made), made, weighted=weighted)
    assert found.startswith("the scale of row 7, block 0 is ")


def test_a_zero_point_that_erases_a_block_is_named() -> None:
    """All weights are negative, and all codes are beyond the smallest."""
    made, values = FORMS["int4"], drawn(WEIGHTS["negative"], FORMS["int4"])
    scales, zeros = block_scales(values, made, NONE)
    zeros[7] = 0
    assert "row 7, block 0" in problem(blocks(values, scales, zeros, made), made, weighted=True)


def test_a_scale_twice_as_coarse_is_named() -> None:
    made, values = FORMS["int4"], drawn(WEIGHTS["normal"], FORMS["int4"])
    scales, zeros = block_scales(values, made)
    scales[7] *= 2
    found = problem(blocks(values, scales, zeros, made), made)
    assert "row 7, block 0 is not the one that the search of an export finds" in found


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16])
def test_scales_that_were_rounded_to_a_narrower_type_are_named(form: str, weights: str, narrow: type) -> None:
    """The cost hardly changes, but no export stores such scales in float32."""
    made, values = FORMS[form], drawn(WEIGHTS[weights], FORMS[form])
    scales, zeros = block_scales(values, made)
    with np.errstate(over="ignore"):
        rounded = scales.astype(narrow).astype(np.float32)
    off = np.abs(rounded.astype(np.float64) - scales) > 1e-4 * np.abs(scales)
    odd = np.flatnonzero(off & (np.abs(scales) > 1e-30) & np.isfinite(rounded))
    if not len(odd):
        pytest.skip("these scales are exact in the narrower type")
    scales[odd[0]] = rounded[odd[0]]
    assert f"the scale of row {odd[0]}, block 0 is " in problem(blocks(values, scales, zeros, made), made)


def test_a_zero_point_that_is_not_stored_is_the_middle() -> None:
    """Scales of a range are none of a symmetric matrix, where they lose more."""
    made, values = FORMS["int4, symmetric"], drawn(WEIGHTS["normal"], FORMS["int4"])
    scales, _ = block_scales(values, FORMS["int4"])
    middle = np.full(len(scales), 8, np.uint8)
    assert problem(blocks(values, scales, middle, made), made)


def test_a_search_for_one_row_in_eight_names_that_row() -> None:
    form, weights = FORMS["int4"], drawn(WEIGHTS[next(iter(WEIGHTS))], FORMS["int4"])
    scales, zeros = block_scales(weights, form)
    scales = scales.copy()
    scales[[3, 16]] *= np.float32(1.01)
    found = blocks(weights, scales, zeros, form)
    assert "row 3," in scale_problem(found, 0, False, weighted=False)
    assert "row 16," in scale_problem(found, 0, False, weighted=False, every=8)
