"""The statistics, on arrays made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import with_checked_noise
from llmconv.verify.sigma import GATES, ExpectedOutput, Measure, NoiseFloor, cache_rows, measure

GATE = GATES["float32"]


def expected_and_output(rows: int = 8, features: int = 32) -> tuple[ExpectedOutput, Array]:
    """An expected output, and an output with as much noise as the eager model."""
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((1, rows, features))
    rounded = exact + 1e-6 * rng.standard_normal(exact.shape)
    truth = NoiseFloor("float32").truth("logits", exact, rounded, np.ones((1, rows), dtype=bool))
    return truth, exact + 1e-6 * rng.standard_normal(exact.shape)


def test_noise_of_the_models_own_size_has_sigma_one() -> None:
    truth, output = expected_and_output()
    found = measure(truth, output)
    assert 0.8 < found.sigma < 1.2
    assert found.passes(GATE)


def test_ten_times_the_noise_fails() -> None:
    truth, output = expected_and_output()
    assert not measure(truth, truth.exact + 10 * (output - truth.exact)).passes(GATE)


def test_one_bad_row_among_many_fails_and_is_named() -> None:
    truth, output = expected_and_output(rows=400)
    output[0, 123] += 2e-5
    found = measure(truth, output)
    assert found.sigma < GATE.aggregate
    assert found.row == (0, 123)
    assert not found.passes(GATE)


def test_rows_under_padding_are_not_compared() -> None:
    truth, output = expected_and_output()
    truth.valid[0, 0] = False
    output[0, 0] += 100
    assert measure(truth, output).passes(GATE)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_under_padding_must_be_finite(value: float) -> None:
    truth, output = expected_and_output()
    truth.valid[0, 0] = False
    output[0, 0, 0] = value
    assert "NaN or infinity" in measure(truth, output).problem


def test_a_shape_mismatch_is_reported() -> None:
    truth, output = expected_and_output()
    assert "shape mismatch: expected [1, 8, 32], got [1, 7, 32]" in measure(truth, output[:, 1:]).problem


def test_an_exact_eager_run_leaves_a_floor_of_half_a_unit_in_the_last_place() -> None:
    exact = np.ones((1, 1, 16))
    truth = NoiseFloor("float32").truth("logits", exact, exact.astype(np.float32), np.ones((1, 1), dtype=bool))
    assert measure(truth, exact * (1 + 2.0**-24)).sigma == pytest.approx(1, rel=0.01)


def test_a_row_that_is_exact_by_chance_has_the_usual_noise_of_its_output() -> None:
    floor = NoiseFloor("float32")
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((1, 50, 16))
    valid = np.ones((1, 50), dtype=bool)
    usual = floor.truth("present.0.key", exact, exact + 1e-6 * rng.standard_normal(exact.shape), valid)
    exact_row = floor.truth("present.0.key", exact[:, :1], exact[:, :1] + 1e-9, valid[:, :1])
    assert exact_row.total_noise > 0.5 * usual.total_noise


def test_another_likeliest_token_fails_unless_it_is_a_near_tie() -> None:
    truth, output = expected_and_output()
    best = int(truth.exact[0, 0].argmax())
    other = (best + 1) % 32
    tie = truth.exact.copy()
    tie[0, 0, other] = tie[0, 0, best] - 1e-7
    near = ExpectedOutput(tie, truth.noise, truth.total_noise, truth.max_noise, truth.valid)
    flipped = tie.copy()
    flipped[0, 0, other] += 2e-7
    assert measure(near, flipped, tokens=True).flips == 0
    output[0, 0, other] = 100
    assert measure(truth, output, tokens=True).flips == 1


def test_the_last_row_alone_can_be_compared() -> None:
    truth, output = expected_and_output()
    assert measure(truth.last(), output[:, -1:]).passes(GATE)


def test_cache_rows_are_tokens() -> None:
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    rows = cache_rows(array)
    assert rows.shape == (2, 4, 15)
    assert np.array_equal(rows[1, 2], array[1, :, 2].ravel())


def test_a_measure_with_a_problem_never_passes() -> None:
    assert not Measure(problem="missing").passes(GATE)


def understated(rows: int, other: float) -> tuple[ExpectedOutput, Array]:
    """An expected output of few rows with too small a noise, and an output with the noise of the other order."""
    truth, output = expected_and_output(rows)
    noise = (output - truth.exact) * other
    return replace(truth, orders=[lambda: truth.exact + noise[:, ::-1]]), truth.exact + noise


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_are_judged_by_the_larger_of_two_noises(rows: int) -> None:
    truth, output = understated(rows, 6)
    assert not measure(truth, output).passes(GATE)
    assert with_checked_noise(truth, lambda truth: measure(truth, output), GATE).passes(GATE)


def test_few_of_many_rows_are_judged_by_the_larger_of_two_noises() -> None:
    truth, output = expected_and_output(256)
    far = truth.exact.copy()
    far[0, 3] += 12 * (output - truth.exact)[0, 3]
    doubted = replace(truth, others=[lambda: far])
    assert measure(truth, far).row_sigma > GATE.row
    assert with_checked_noise(doubted, lambda truth: measure(truth, far), GATE).passes(GATE)


@pytest.mark.parametrize(("error", "passes"), [(6, True), (100, False)])
def test_the_noise_of_many_failing_rows_is_doubted_within_a_factor(error: int, passes: bool) -> None:
    truth, output = understated(65, error)
    assert not measure(truth, output).passes(GATE)
    assert with_checked_noise(truth, lambda truth: measure(truth, output), GATE).passes(GATE) is passes


def test_another_order_with_another_result_is_not_noise() -> None:
    truth, output = understated(1, 1000)
    assert not with_checked_noise(truth, lambda truth: measure(truth, output), GATE).passes(GATE)


def test_a_row_that_a_nudge_moves_far_has_that_noise_and_no_other_row_has() -> None:
    truth, output = expected_and_output(64)
    far = output.copy()
    far[0, 3] = truth.exact[0, 3] + 30 * (output - truth.exact)[0, 3]
    chaotic = replace(truth, others=[lambda: far])
    again = chaotic.again()
    assert again.noise[0, 3] > 16 * truth.noise[0, 3]
    assert np.delete(again.noise / truth.noise, 3, 1).max() < 2
    elsewhere = output.copy()
    elsewhere[0, 9] = truth.exact[0, 9] + 12 * (output - truth.exact)[0, 9]
    for wrong, passes in ((far, True), (elsewhere, False)):
        assert measure(again, wrong).passes(GATE) is passes


def test_a_fault_fails_also_with_another_order() -> None:
    truth, output = expected_and_output(1)
    doubted = replace(truth, others=[lambda: output])
    wrong = truth.exact + 10 * (output - truth.exact)
    assert not with_checked_noise(doubted, lambda truth: measure(truth, wrong), GATE).passes(GATE)


def norm_in_onnxruntime(states: Array) -> Array:
    """The RMS norm of rows [rows, width] without weights, by onnxruntime."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, states.shape) for name in ("x", "y")]
    ones = helper.make_tensor("w", TensorProto.FLOAT, [states.shape[1]], np.ones(states.shape[1], np.float32))
    node = helper.make_node("RMSNormalization", ["x", "w"], ["y"], epsilon=1e-6)
    graph = helper.make_graph([node], "norm", ports[:1], ports[1:], [ones])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: Array = session.run(None, {"x": states})[0]
    return found


def norm_in_torch(states: torch.Tensor) -> torch.Tensor:
    """The same by torch, in the dtype of the rows."""
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(("width", "passes"), [(0, False), (8192, True)])
def test_the_noise_of_wide_models_includes_that_of_a_norm_in_onnxruntime(width: int, passes: bool) -> None:
    """Without it, a correct graph of a bfloat16 model of width 8192 fails."""
    generator = torch.Generator().manual_seed(0)
    states = (torch.randn(33, 8192, generator=generator) * 0.02).bfloat16().float()
    exact, rounded = norm_in_torch(states.double()).numpy()[None], norm_in_torch(states).numpy()[None]
    truth = NoiseFloor("float32", width).truth("hidden state", exact, rounded, np.ones((1, 33), dtype=bool))
    assert measure(truth, norm_in_onnxruntime(states.numpy())[None]).passes(GATE) is passes


def test_the_noise_of_a_wide_model_does_not_hide_a_wrong_epsilon() -> None:
    """A hidden state of the size of trained embeddings, and an epsilon of 1e-5 for 1e-6."""
    generator = torch.Generator().manual_seed(0)
    states = (torch.randn(33, 8192, generator=generator) * 0.02).bfloat16().float()
    exact, rounded = norm_in_torch(states.double()).numpy()[None], norm_in_torch(states).numpy()[None]
    truth = NoiseFloor("float32", 8192).truth("hidden state", exact, rounded, np.ones((1, 33), dtype=bool))
    other = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert measure(truth, other.numpy()[None]).sigma > 1000
