"""Where half precision chooses experts, a scenario is judged by its calmest rows."""

from __future__ import annotations

import numpy as np
import pytest

from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import fold
from llmconv.verify.results import Check
from llmconv.verify.sigma import GATES, Gates, NoiseFloor, calmest_sigma, measure

ROUTED = Gates(GATES["float16"].aggregate, GATES["float16"].row, calmest=True)
ROWS = 20


def errors(factors: Array, output: str = "present.3.key") -> Check:
    """The check of one output; each row differs by `factors` times the noise."""
    rng = np.random.default_rng(0)
    exact, noise = rng.standard_normal((1, len(factors), 64)), 1e-3 * rng.standard_normal((2, 1, len(factors), 64))
    truth = NoiseFloor("float16").truth(output, exact, exact + noise[0], np.ones((1, len(factors)), bool))
    found = measure(truth, exact + noise[1] * factors[None, :, None])
    return fold(Check("a scenario", "prefill.onnx", ""), output, [found], ROUTED)


def test_rows_after_another_choice_do_not_fail() -> None:
    assert errors(np.where(np.arange(ROWS) < 5, 1.0, 50.0)).verdict == "pass"


@pytest.mark.parametrize("factor", [4.0, 50.0])
def test_a_fault_of_all_rows_fails(factor: float) -> None:
    assert errors(np.full(ROWS, factor)).verdict == "fail"


def test_few_rows_are_skipped() -> None:
    assert errors(np.full(4, 50.0)).verdict == "skip"


def test_a_state_of_all_tokens_is_skipped() -> None:
    assert errors(np.full(ROWS, 50.0), "present_recurrent.3").verdict == "skip"


def test_a_correct_output_passes_whatever_its_rows() -> None:
    assert errors(np.ones(4)).verdict == errors(np.ones(4), "present_recurrent.3").verdict == "pass"


def test_nothing_is_said_of_no_rows() -> None:
    assert calmest_sigma([]) is None
