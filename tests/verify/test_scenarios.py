"""The scenario matrix: every call is well-formed, the same each time, and fits the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmconv.errors import UsageProblem
from llmconv.verify.calls import Facts
from llmconv.verify.scenarios import SCENARIOS, Scenario, chosen, scenarios

FACTS = Facts(50, 300, window=8, original=40, greedy=lambda ids, steps: np.pad(ids, ((0, 0), (0, steps))))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_call_continues_the_one_before(scenario: Scenario) -> None:
    for chain in scenario.build(FACTS):
        past = 0
        for call in chain:
            past -= call.edit.drop
            assert call.attention_mask.shape == (len(call.input_ids), past + call.input_ids.shape[1])
            assert call.position_ids.shape == call.input_ids.shape
            past = call.attention_mask.shape[1]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_scenario_is_the_same_each_time(scenario: Scenario) -> None:
    first, second = (scenario.build(FACTS) for _ in range(2))
    pairs = [(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)]
    assert pairs
    assert all(np.array_equal(a.input_ids, b.input_ids) for a, b in pairs)


def test_names_are_unique_and_every_scenario_tells_the_bug_it_is_for() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    assert all("#" in scenario.bug for scenario in SCENARIOS)


def test_nothing_runs_beyond_the_context() -> None:
    built = scenarios("full", Facts(vocab_size=50, max_positions=16))
    assert max(int(call.position_ids.max()) for _, chains in built for chain in chains for call in chain) == 15


def test_the_window_is_crossed_only_where_there_is_a_short_one() -> None:
    names = [
        [scenario.name for scenario, _ in scenarios("quick", Facts(50, 300, window))] for window in (8, 4096, None)
    ]
    assert ["sliding window crossed" in found for found in names] == [True, False, False]


def test_the_splits_are_of_one_prompt() -> None:
    chains = dict((scenario.name, chains) for scenario, chains in scenarios("quick", FACTS))
    splits = chains["chunked prefill, every split of 9 tokens"]
    prompts = {tuple(np.concatenate([call.input_ids[0] for call in chain])) for chain in splits}
    assert len(splits) == 8
    assert len(prompts) == 1


def test_padding_lies_where_its_name_says() -> None:
    chains = dict((scenario.name, chains) for scenario, chains in scenarios("quick", FACTS))
    left, right = (chains[f"{side} padding"][0][0].attention_mask for side in ("left", "right"))
    assert left[1, 0] == 0 and left[1, -1] == 1
    assert right[1, 0] == 1 and right[1, -1] == 0


@pytest.mark.parametrize("kind", ["original", "window", "states"])
def test_what_a_model_lacks_is_not_run(kind: str) -> None:
    lacking = {"original": Facts(50, 300), "window": Facts(50, 300), "states": Facts(50, 300, keeps_states=True)}
    left_out = {
        "original": "beyond the original context",
        "window": "sliding window crossed",
        "states": "tokens taken back",
    }
    assert left_out[kind] not in [scenario.name for scenario, _ in scenarios("full", lacking[kind])]


def test_the_one_token_of_a_step_is_no_padding_where_layers_keep_states() -> None:
    facts = Facts(50, 300, window=8, original=40, keeps_states=True)
    steps = [call for _, chains in scenarios("full", facts) for chain in chains for call in chain[1:]]
    assert all(call.attention_mask[:, -1].all() for call in steps if call.input_ids.shape[1] == 1)


def test_rows_that_are_exchanged_take_their_masks_along() -> None:
    (chain,) = dict((scenario.name, chains) for scenario, chains in scenarios("quick", FACTS))["rows exchanged"]
    before, after = chain[0].attention_mask, chain[1].attention_mask[:, :7]
    assert np.array_equal(after, before[[2, 0, 0]])
    assert np.array_equal(chain[3].attention_mask[:, :7], before[[0, 0, 2]])


def test_the_suite_has_what_the_public_bugs_ask_for() -> None:
    assert len([scenario for scenario in SCENARIOS if scenario.suite == "quick"]) >= 23
    assert len(SCENARIOS) >= 32


def test_an_unknown_scenario_is_answered_with_those_that_are_near() -> None:
    with pytest.raises(UsageProblem, match="no scenario `left pading`") as caught:
        chosen("quick", ["left pading"])
    assert "left padding" in caught.value.hint


def test_the_page_lists_every_scenario_with_its_bug() -> None:
    page = (Path(__file__).parents[2] / "docs/verification.md").read_text()
    assert [s.name for s in SCENARIOS if f"| {s.name} | {s.suite} | {s.bug} |" not in page] == []
