"""The scenario matrix: every call is well-formed, the same each time, and fits the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from llmconv.errors import UsageProblem
from llmconv.runtime.extra_inputs import BATCH, SEQUENCE, TOTAL, ExtraInput
from llmconv.verify.scenarios.calls import Call, ModelFacts
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.scenarios.table import SCENARIOS, Scenario

CACHE = {"present.0.key": (1, 2, 1, 4), "present.0.value": (1, 2, 1, 4)}
EXTRAS = {
    "kind": ExtraInput("kind", (BATCH,), values=3),
    "segment": ExtraInput("segment", (BATCH, SEQUENCE), values=4),
    "shown": ExtraInput("shown", (BATCH, TOTAL), dtype="bool", values=2),
    "filled": ExtraInput("filled", (BATCH,), default=lambda call: call.attention_mask.sum(axis=1)),
}
FACTS = ModelFacts(
    50,
    300,
    windows=(8,),
    original=40,
    cache=CACHE,
    greedy=lambda ids, steps: np.pad(ids, ((0, 0), (0, steps))),
    extra_inputs=EXTRAS,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_call_continues_the_one_before(scenario: Scenario) -> None:
    for chain in scenario.build(FACTS):
        past = chain[0].known
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


def test_names_are_unique_and_every_scenario_names_its_bug() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    assert all("#" in scenario.bug for scenario in SCENARIOS)


def test_nothing_runs_beyond_the_context() -> None:
    built = Selection("full").calls(ModelFacts(vocab_size=50, max_positions=16))
    assert max(int(call.position_ids.max()) for _, chains in built for chain in chains for call in chain) == 15


def names_of(suite: str, facts: ModelFacts) -> set[str]:
    """The scenarios that apply."""
    return {scenario.name for scenario, _ in Selection(suite).calls(facts)}


def test_a_prompt_crosses_the_window_only_where_it_is_a_short_one() -> None:
    found = [names_of("quick", ModelFacts(50, 9000, windows)) for windows in ((8,), (4096,), ())]
    assert ["sliding window crossed" in names for names in found] == [True, False, False]


@pytest.mark.parametrize("window", [40, 600, 4096, 32768])
def test_a_synthetic_past_crosses_windows_of_any_size(window: int) -> None:
    facts = ModelFacts(50, 1 << 17, (window,), cache=CACHE)
    ((_, (chain,)),) = Selection("quick", ["window crossed behind a made-up past"]).calls(facts)
    ends = [call.attention_mask.shape[1] for call in chain]
    assert chain[0].known < window < ends[0] and ends[-1] == window + 7
    assert chain[0].start and chain[0].start.loud[0] == 0


def test_a_window_as_long_as_the_context_is_never_crossed() -> None:
    facts = ModelFacts(50, 4096, (4096,), cache=CACHE)
    assert "window crossed behind a made-up past" not in names_of("full", facts)
    assert Selection("full").left_out(facts) == []


def test_a_past_that_is_too_large_for_the_model_is_left_out_with_the_reason() -> None:
    large = {"present.0.key": (1, 64, 1, 128), "present.0.value": (1, 64, 1, 128)}
    facts = ModelFacts(50, 1 << 17, (32768,), cache=large)
    reasons = {scenario.name: reason for scenario, reason in Selection("quick").left_out(facts)}
    assert "window crossed behind a made-up past" not in names_of("quick", facts)
    assert "past of 32768 tokens left out: the cache takes 8,192 MiB" in reasons["window crossed behind a made-up past"]


def test_the_full_suite_has_more_room_than_the_quick_one() -> None:
    facts = ModelFacts(50, 1 << 17, (8192,), cache={"present.0.key": (1, 8, 1, 128), "present.0.value": (1, 8, 1, 128)})
    wanted = "window crossed behind a made-up past"
    assert [wanted in names_of(suite, facts) for suite in ("quick", "full")] == [False, True]


def test_scenarios_without_a_held_cache_are_left_out_with_the_reason() -> None:
    facts = ModelFacts(50, 300, no_edits="nothing is held", no_synthetic_past="nothing is held")
    names = {scenario.name for scenario, reason in Selection("quick").left_out(facts) if reason == "nothing is held"}
    assert {"rows exchanged", "tokens taken back", "garbage under the mask", "pasts of 30 to 1,022 tokens"} <= names


def calls_of(suite: str, facts: ModelFacts) -> list[Call]:
    """Every call of a suite."""
    return [call for _, chains in Selection(suite).calls(facts) for chain in chains for call in chain]


def news(calls: Sequence[Call], *, past: bool) -> set[int]:
    """Numbers of new tokens of calls with a past or without one."""
    return {c.input_ids.shape[1] for c in calls if (c.attention_mask.shape[1] > c.input_ids.shape[1]) is past}


def test_the_full_suite_runs_every_number_of_new_tokens_with_and_without_a_past() -> None:
    calls = calls_of("full", ModelFacts(50, 128, cache=CACHE))
    for past in (False, True):
        assert set(range(1, 49)) <= news(calls, past=past)


def test_the_quick_suite_runs_most_numbers_of_new_tokens_that_clients_send() -> None:
    assert {*range(1, 14), 16, 24, 32, 48} <= news(calls_of("quick", ModelFacts(50, 128, cache=CACHE)), past=True)


@pytest.mark.parametrize("suite", ["quick", "full"])
def test_every_batch_size_to_six_is_run(suite: str) -> None:
    assert {len(call.input_ids) for call in calls_of(suite, FACTS)} == set(range(1, 7))


@pytest.mark.parametrize(("suite", "context"), [("quick", 128), ("full", 2048), ("full", 4096)])
def test_every_position_of_a_short_context_is_run(suite: str, context: int) -> None:
    calls = calls_of(suite, ModelFacts(50, context, cache=CACHE))
    assert set(np.concatenate([call.position_ids.ravel() for call in calls]).tolist()) == set(range(context))


def test_positions_are_spread_over_a_long_context() -> None:
    ((_, chains),) = Selection("quick", ["positions over the whole context"]).calls(ModelFacts(50, 1 << 17))
    shares = np.concatenate([call.position_ids.ravel() for call in chains[0]]) * 144 // (1 << 17)
    assert set(shares.tolist()) == set(range(144))


def test_the_splits_are_of_one_prompt() -> None:
    chains = dict((scenario.name, chains) for scenario, chains in Selection("full").calls(FACTS))
    splits = chains["chunked prefill, every split of 9 tokens"]
    prompts = {tuple(np.concatenate([call.input_ids[0] for call in chain])) for chain in splits}
    assert len(splits) == 8
    assert len(prompts) == 1


def test_padding_is_on_the_side_in_the_name() -> None:
    chains = dict((scenario.name, chains) for scenario, chains in Selection("quick").calls(FACTS))
    left, right = (chains[f"{side} padding"][0][0].attention_mask for side in ("left", "right"))
    assert left[0, 0] == 0 and left[0, -1] == 1
    assert right[1, 0] == 1 and right[1, -1] == 0


@pytest.mark.parametrize("kind", ["original", "window", "states"])
def test_scenarios_for_missing_features_are_not_run(kind: str) -> None:
    lacking = {
        "original": ModelFacts(50, 300),
        "window": ModelFacts(50, 300),
        "states": ModelFacts(50, 300, keeps_states=True),
    }
    left_out = {
        "original": "beyond the original context",
        "window": "sliding window crossed",
        "states": "tokens taken back",
    }
    assert left_out[kind] not in [scenario.name for scenario, _ in Selection("full").calls(lacking[kind])]


def test_a_single_new_token_is_never_padding_for_layers_with_states() -> None:
    facts = ModelFacts(50, 300, windows=(8,), original=40, keeps_states=True, cache=CACHE)
    steps = [call for _, chains in Selection("full").calls(facts) for chain in chains for call in chain[1:]]
    assert all(call.attention_mask[:, -1].all() for call in steps if call.input_ids.shape[1] == 1)


def test_rows_that_are_exchanged_take_their_masks_along() -> None:
    (chain,) = dict((scenario.name, chains) for scenario, chains in Selection("quick").calls(FACTS))["rows exchanged"]
    before, after = chain[0].attention_mask, chain[1].attention_mask[:, :7]
    assert np.array_equal(after, before[[2, 0, 0]])
    assert np.array_equal(chain[3].attention_mask[:, :7], before[[0, 0, 2]])


def test_the_suites_have_enough_scenarios() -> None:
    assert len([scenario for scenario in SCENARIOS if scenario.suite == "quick"]) >= 23
    assert len(SCENARIOS) >= 32


def test_an_unknown_scenario_gets_similar_names_as_hint() -> None:
    with pytest.raises(UsageProblem, match="unknown scenario `left pading`") as caught:
        Selection("quick", ["left pading"])
    assert "left padding" in caught.value.hint
    with pytest.raises(UsageProblem, match="unknown scenario `qqq`") as caught:
        Selection("quick", ["qqq"])
    assert caught.value.hint == "one is `left padding`; docs/verification-scenarios.md lists all"


def test_the_page_lists_every_scenario_with_its_bug() -> None:
    page = (Path(__file__).parents[3] / "docs/verification-scenarios.md").read_text()
    assert [s.name for s in SCENARIOS if f"| {s.name} | {s.suite} | {s.bug} |" not in page] == []


def test_extra_inputs_have_values_of_the_calls_that_differ_and_follow_their_rows() -> None:
    ((_, (calls,)),) = Selection("quick", ["rows exchanged"]).calls(FACTS)
    first, second = (call.extras for call in calls[:2])
    assert first is not None and second is not None and "filled" not in first
    rows = list(calls[1].edit.rows or ())
    assert np.array_equal(second["kind"], first["kind"][rows])
    assert np.array_equal(second["shown"][:, :7], first["shown"][rows])
    assert second["segment"].shape == calls[1].input_ids.shape
    built = [call for _, chains in Selection("full").calls(FACTS) for chain in chains for call in chain if call.extras]
    assert {int(number) for call in built for number in (call.extras or {})["kind"]} == {0, 1, 2}


def test_tokens_that_are_taken_back_take_their_values_with_them() -> None:
    ((_, (calls,)),) = Selection("quick", ["tokens taken back"]).calls(FACTS)
    kept, then = (dict(call.extras or {})["shown"] for call in calls[1:3])
    assert np.array_equal(kept[:, :7], then[:, :7]) and then.shape == calls[2].attention_mask.shape
