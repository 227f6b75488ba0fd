"""The default gates of presets: what is judged against what, and within which error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmconv.export.quantization.settings import PRESETS
from llmconv.verify.other_exporters.quantized.accuracy import (
    GATES,
    AccuracyGate,
    AccuracyLimits,
    check_gate,
    check_limits,
    gate_of,
)
from llmconv.verify.results import AccuracyCost, Estimate

COST = AccuracyCost("graph", 1024, {"mean": 0.3, "median": 0.2, "p99": 1.0, "max": 2.0}, 0.01, 0.7)


def cost(mean: float) -> AccuracyCost:
    return replace(COST, divergence={**COST.divergence, "mean": mean})


def test_every_preset_has_a_gate() -> None:
    assert PRESETS.keys() <= GATES.keys()


def test_codes_that_a_model_had_before_are_judged_as_8_bits() -> None:
    assert gate_of("gptq") == gate_of("fp8") == GATES["int8"]
    assert gate_of("") == AccuracyGate()


@pytest.mark.parametrize(
    ("mean", "verdict"), [(0.005, "pass"), (0.039, "pass"), (0.041, "fail"), (float("nan"), "fail")]
)
def test_8_bits_are_judged_by_a_limit_and_its_error(mean: float, verdict: str) -> None:
    (check,) = check_gate("int8", GATES["int8"], cost(mean), None)
    assert check.verdict == verdict


@pytest.mark.parametrize(
    ("mean", "excess", "verdict"),
    [
        (0.3, -0.02, "pass"),
        (0.3, 0.029, "pass"),
        (0.3, 0.031, "fail"),
        (0.009, 0.031, "pass"),  # negligible, whatever plain rounding costs
        (float("nan"), float("nan"), "fail"),
    ],
)
def test_4_bits_are_judged_by_plain_rounding(mean: float, excess: float, verdict: str) -> None:
    (check,) = check_gate("int4", GATES["int4"], cost(mean), Estimate(excess, 0.01))
    assert check.verdict == verdict
    assert ("worse than plain rounding" in check.detail) is (verdict == "fail")


@pytest.mark.parametrize(("excess", "verdict"), [(0.009, "pass"), (0.011, "fail")])
def test_a_negligible_difference_to_plain_rounding_does_not_count(excess: float, verdict: str) -> None:
    (check,) = check_gate("int4", GATES["int4"], cost(0.3), Estimate(excess, 0.0001))
    assert check.verdict == verdict


def test_less_than_plain_rounding_reads_as_less() -> None:
    (check,) = check_gate("int4", GATES["int4"], cost(0.26), Estimate(-0.034, 0.009))
    assert check.detail == "mean divergence 0.26 nats, 0.034 ± 0.009 less than with plain rounding"


@pytest.mark.parametrize(
    ("mean", "verdicts"), [(0.5, []), (4.999, ["fail"]), (7.0, ["fail"]), (float("nan"), ["fail"])]
)
def test_graphs_of_other_exporters_know_more_than_equal_probabilities(mean: float, verdicts: list[str]) -> None:
    found = check_gate("", gate_of(""), replace(cost(mean), uniform=5.0), None)
    assert [check.verdict for check in found] == verdicts


def test_limits_of_the_user_have_no_tolerance() -> None:
    assert [check.verdict for check in check_limits(COST, AccuracyLimits(0.299))] == ["fail"]
    assert [check.verdict for check in check_limits(COST, AccuracyLimits(0.3, 0.7))] == ["pass"]
    assert check_limits(COST, AccuracyLimits()) == []
