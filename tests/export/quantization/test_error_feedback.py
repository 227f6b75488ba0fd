"""GPTQ: later columns make up for the rounding errors of earlier ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmconv.export.quantization.block_rounding import BlockFormat, block_scales
from llmconv.export.quantization.sequential_rounding import DAMPING, inverse_factor, rounded_with_feedback
from llmconv.tensors import Array

FORM = BlockFormat(size=16)


def problem(seed: int = 0) -> tuple[Array, Array]:
    """Weights [24, 64], and X^T X of inputs whose channels depend on each other."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(2000, 64)) @ random.normal(size=(64, 64))
    return random.normal(size=(24, 64)).astype(np.float32), (inputs.T @ inputs).astype(np.float32)


def values(codes: Array, scales: Array, zeros: Array, size: int = FORM.size) -> Array:
    wide = codes.astype(np.float64) - zeros.repeat(size, 1)
    return wide * scales.repeat(size, 1)


def output_error(weights: Array, rounded: Array, hessian: Array) -> float:
    """tr(D H D^T) of D = weights - rounded."""
    off = weights - rounded
    return float(np.einsum("nk,kl,nl->", off, hessian.astype(np.float64), off))


def reference(weights: Array, hessian: Array) -> Array:
    """Values by the optimal-brain-surgeon update of the whole matrix, with H inverted anew after every column."""
    damped = hessian.astype(np.float64) + DAMPING * hessian.astype(np.float64).diagonal().mean() * np.eye(64)
    left, made = weights.astype(np.float64), np.empty(weights.shape)
    for column in range(64):
        if column % FORM.size == 0:
            block = slice(column, column + FORM.size)
            chosen = np.ascontiguousarray(left[:, block], np.float32)
            scales, zeros = block_scales(chosen, FORM, hessian.diagonal()[block].copy())
        inverse = np.linalg.inv(damped[column:, column:])
        codes = np.clip(np.floor(left[:, column] / scales + zeros + 0.5), 0, FORM.largest)
        made[:, column] = (codes - zeros) * scales.astype(np.float64)
        error = (left[:, column] - made[:, column]) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
    return made


def solved(weights: Array, hessian: Array, form: BlockFormat = FORM) -> Array:
    made = rounded_with_feedback(weights, inverse_factor(hessian), hessian.diagonal().copy(), form)
    return values(*made)


def test_values_are_those_of_the_optimal_brain_surgeon() -> None:
    weights, hessian = problem()
    assert np.allclose(solved(weights, hessian), reference(weights, hessian), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_output_error_is_less_than_that_of_a_search(symmetric: bool) -> None:
    weights, hessian = problem()
    form = BlockFormat(size=16, symmetric=symmetric)
    diagonal = np.diag(hessian.diagonal())
    searched = rounded_with_feedback(weights, inverse_factor(diagonal), hessian.diagonal().copy(), form)
    error = output_error(weights, solved(weights, hessian, form), hessian)
    assert error < 0.7 * output_error(weights, values(*searched), hessian)


def test_without_dependent_channels_every_code_is_the_nearest() -> None:
    weights, hessian = problem()
    diagonal = np.diag(hessian.diagonal())
    codes, scales, zeros = rounded_with_feedback(weights, inverse_factor(diagonal), hessian.diagonal().copy(), FORM)
    exact = np.clip(weights / scales.repeat(16, 1) + zeros.repeat(16, 1), 0, 15)
    assert np.abs(exact - codes).max() <= 0.5 + 1e-4


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    weights, hessian = problem()
    before = torch.get_num_threads()
    made = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        made.append(solved(weights, hessian))
    torch.set_num_threads(before)
    assert np.array_equal(made[0], made[1])


def test_a_channel_that_is_always_zero_is_no_obstacle() -> None:
    weights, hessian = problem()
    hessian[5] = hessian[:, 5] = 0
    assert np.isfinite(solved(weights, hessian)).all()
