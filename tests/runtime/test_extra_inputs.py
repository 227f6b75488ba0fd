"""Extra inputs: what a row may declare, the values of a call, and parts of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.runtime.extra_inputs import (
    BATCH,
    PAST,
    SEQUENCE,
    TOTAL,
    ExtraInput,
    ExtraValues,
    ModelCall,
    grown,
    part,
    require_parameters,
    resolved_inputs,
)

IDS = np.ones((2, 3), dtype=np.int64)
CALL = ModelCall(IDS, np.ones((2, 8), dtype=np.int64), IDS)
"""Three tokens after a past of five."""

SEGMENTS = ExtraInput("segments", (BATCH, SEQUENCE), values=4)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "input_ids", "values": 2}, "has the name of an input that every graph has"),
        ({"name": "past_key", "values": 2}, "has the name of an input that every graph has"),
        ({"name": "a b", "values": 2}, "is not named like a parameter"),
        ({"dtype": "int8", "values": 2}, "has the dtype `int8`"),
        ({"axes": (BATCH, BATCH), "values": 2}, "has the same axis twice"),
        ({"axes": [BATCH], "values": 2}, "needs a tuple of axes"),
        ({}, "has one constant value"),
        ({"values": 2, "default": "x"}, "neither a number nor a function"),
    ],
)
def test_an_input_that_no_graph_can_have_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageProblem, match=problem):
        ExtraInput(**{"name": "x", "axes": (BATCH,), **fields})


def test_sizes_are_numbers_fields_or_functions_of_the_config() -> None:
    config = SimpleNamespace(hidden=6, kinds=2)
    extra = ExtraInput("x", (BATCH, "hidden", lambda c: c.hidden + 1), values="kinds").resolved(config)
    assert (extra.axes, extra.values) == ((BATCH, 6, 7), 2)


@pytest.mark.parametrize("axis", ["sequence_lenght", lambda config: config.missing, lambda config: "six", 0])
def test_a_size_that_the_config_does_not_give_is_refused(axis: Any) -> None:
    with pytest.raises(UnsupportedInput, match="the extra input `x` has the"):
        ExtraInput("x", (BATCH, axis), values=2).resolved(SimpleNamespace())


def test_an_input_with_one_valid_value_is_left_out() -> None:
    assert resolved_inputs([ExtraInput("x", (BATCH,), values=1)], None) == {}


def test_the_default_has_the_sizes_of_the_call() -> None:
    extra = ExtraInput("x", (BATCH, 3, PAST, TOTAL), "float32", default=0.5, values=1.0)
    value = extra.value(CALL)
    assert (value.shape, str(value.dtype), value.max()) == ((2, 3, 5, 8), "float32", 0.5)


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (
            lambda call: call.input_ids[:1],
            r"returns int64 \[1, 3\], and not int64 \[batch_size = 2, sequence_length = 3\]",
        ),
        (lambda call: call.input_ids * 1.0, "returns float64"),
        (lambda call: call.input_ids - 2, "returns the value -1, and not numbers from 0 on"),
        (lambda call: call.nothing, "fails: AttributeError"),
    ],
)
def test_a_hook_with_a_wrong_result_is_refused_in_words(hook: Any, problem: str) -> None:
    with pytest.raises(UnsupportedInput, match=problem):
        ExtraInput("x", (BATCH, SEQUENCE), default=hook).value(CALL)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"y": IDS}, "the model has no extra input `y`"),
        ({"segments": IDS[:, :2]}, r"int64 \[2, 2\], and not int64"),
        ({"segments": IDS + 3}, "the value 4, and not numbers from 0 to 3"),
        ({"segments": IDS.astype(np.int32)}, "int32"),
        ({"past": IDS}, "is computed"),
    ],
)
def test_given_values_that_do_not_fit_are_refused(given: dict[str, Any], problem: str) -> None:
    past = ExtraInput("past", (BATCH, PAST), default=lambda call: call.attention_mask[:, :5])
    with pytest.raises(UsageProblem, match=problem):
        ExtraValues({"segments": SEGMENTS, "past": past}, given).of(CALL)


def test_given_values_come_before_the_default() -> None:
    values = ExtraValues({"segments": SEGMENTS}, {"segments": IDS * 3}).of(CALL)
    assert values["segments"].min() == 3


def test_parts_follow_the_axes() -> None:
    whole = np.arange(2 * 3 * 8).reshape(2, 3, 8)
    one = ModelCall(IDS[:, 1:2], CALL.attention_mask[:, :7], IDS[:, 1:2])
    found = part(ExtraInput("x", (BATCH, SEQUENCE, TOTAL), values=99), whole, one, 1)
    assert np.array_equal(found, whole[:, 1:2, :7])


def test_a_grown_value_repeats_the_first_row() -> None:
    value, extra = np.array([[[1, 2]], [[3, 4]]]), ExtraInput("x", (2, BATCH, SEQUENCE), values=9)
    found = grown(extra, value, {BATCH: 2, SEQUENCE: 3})
    assert found.tolist() == [[[1, 2, 0], [1, 2, 0]], [[3, 4, 0], [3, 4, 0]]]


def test_a_forward_without_the_parameter_is_refused_with_a_close_name() -> None:
    with pytest.raises(UnsupportedInput, match="does not take") as refused:
        require_parameters(lambda input_ids, token_types: None, ["token_type", "token_types"])
    assert "token_types" in refused.value.hint


def test_a_forward_that_needs_another_parameter_is_refused() -> None:
    with pytest.raises(UnsupportedInput, match="needs `language`"):
        require_parameters(lambda input_ids, language: None, [])
