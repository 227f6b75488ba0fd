"""The order under a budget, the mandatory scenarios, and what a clock leaves out."""

from __future__ import annotations

import pytest

from llmconv.errors import UsageProblem
from llmconv.verify.results import Report
from llmconv.verify.scenarios.calls import Chain, ModelFacts
from llmconv.verify.scenarios.selection import (
    CORE,
    CORE_STREAMED,
    RANKS,
    Budget,
    Paced,
    Selection,
    parse_budget,
    tokens_of,
)
from llmconv.verify.scenarios.table import SCENARIOS, Scenario
from llmconv.verify.verification import record_budget
from tests.builders.clocks import FakeClock

FACTS = ModelFacts(vocab_size=50, max_positions=1 << 12)
Planned = list[tuple[Scenario, list[Chain]]]


def planned_with(budget: Budget) -> Planned:
    """The scenarios of a model, in the order of a budget."""
    return Selection(budget=budget).calls(FACTS)


def run(rows: Paced[Scenario], clock: FakeClock, per_token: float) -> list[str]:
    """Names of the scenarios that run if each token takes `seconds`."""
    names = []
    for scenario, chains in rows:
        names.append(scenario.name)
        clock.now += per_token * tokens_of(chains)
    return names


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60), ("5m", 300), ("1h", 3600), ("90", 90), ("0.5", 0.5), ("1.5h", 5400), (" 2 M ", 120), ("007s", 7)],
)
def test_a_time_is_a_number_with_a_unit_or_seconds(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["0", "0s", "-1s", "5 apples", "nan", "inf", "1e400s", "", " ", "s", "1d", "1m30s", "٣s", "1_0s", ".5", "1.", "+1",
     "9" * 301, "9" * 300 + "." + "9" * 300 + "hh", "60s\n--", "0x10", "1,5m"],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line_with_a_hint(text: str) -> None:
    with pytest.raises(UsageProblem, match="invalid budget") as refused:
        parse_budget(text)
    assert refused.value.exit_code == 2
    assert refused.value.hint and "`60s`" in refused.value.hint
    assert len(refused.value.message) < 70


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_number_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(UsageProblem, match="`budget` is"):
        Budget.of(seconds)


def test_selected_scenarios_exclude_a_budget() -> None:
    with pytest.raises(UsageProblem, match="`--budget` excludes `--scenario`"):
        Budget.of(60, ["left padding"])


def test_without_a_budget_the_order_is_that_of_the_table() -> None:
    assert Budget.of(None) is None
    assert Selection("full").scenarios() == list(SCENARIOS)


def test_with_a_budget_the_order_is_that_of_the_ranks_then_that_of_the_table() -> None:
    quick, full = (Selection(suite, budget=Budget(60, FakeClock())).scenarios() for suite in ("quick", "full"))
    assert [row.name for row in quick] == [name for name, _, _ in RANKS]
    assert [row.name for row in full[len(quick) :]] == [row.name for row in SCENARIOS if row.suite == "full"]


def test_every_quick_scenario_has_a_rank_and_the_core_comes_first() -> None:
    names = [name for name, _, _ in RANKS]
    assert sorted(names) == sorted(row.name for row in SCENARIOS if row.suite == "quick")
    assert tuple(names[: len(CORE)]) == CORE


@pytest.mark.parametrize("core", [CORE, CORE_STREAMED])
def test_the_core_has_a_prefill_a_decode_chain_and_a_padded_batch(core: tuple[str, ...]) -> None:
    assert {"prefill, 33 tokens", "decode chain, 16 steps", "left padding"} <= set(core)


def test_the_core_runs_whatever_the_time_and_nothing_else_after_it() -> None:
    clock = FakeClock()
    budget = Budget(1, clock)
    rows = Paced(planned_with(budget), budget)
    names = run(rows, clock, per_token=1)
    assert set(names) <= set(CORE)
    assert names + [row.name for row in rows.left] == [row.name for row, _ in planned_with(budget)]
    assert [name for name, _ in budget.ran] == names
    assert list(budget.left) == [row.name for row in rows.left]


def test_all_scenarios_run_if_the_time_suffices() -> None:
    clock = FakeClock()
    budget = Budget(1e6, clock)
    rows = Paced(planned_with(budget), budget)
    assert run(rows, clock, per_token=1) == [row.name for row, _ in planned_with(budget)]
    assert not rows.left and not budget.left


def test_a_scenario_too_long_for_the_rest_of_the_time_gives_way_to_a_shorter_one() -> None:
    clock = FakeClock()
    planned = planned_with(Budget(1, clock))
    core = sum(tokens_of(chains) for row, chains in planned if row.name in CORE)
    budget = Budget(core + 60, clock)
    rows = Paced(planned, budget)
    names = run(rows, clock, per_token=1)
    assert [name for name in names if name not in CORE][:2] == ["right padding", "first and last token"]
    assert rows.left[0].name == "positions over the whole context"
    assert budget.used < budget.seconds


def test_a_row_that_opens_the_model_again_needs_that_time_too() -> None:
    clock = FakeClock()
    budget = Budget(100, clock)
    clock.now = 30
    (pair,) = [one for one in planned_with(budget) if one[0].name == "batch of 3"]
    run(Paced([pair], budget), clock, per_token=1)
    assert clock.now == 30 + tokens_of(pair[1])
    assert budget.admits("batch of 3", tokens_of(pair[1]), reopens=False)
    clock.now = 60
    assert budget.admits("louder weights", 9, reopens=True)
    clock.now = 62
    assert not budget.admits("louder weights", 9, reopens=True)


def test_before_a_run_layer_by_layer_the_estimate_decides() -> None:
    budget = Budget(100, FakeClock())
    planned = planned_with(budget)
    budget.choose(planned, 1000)
    assert budget.chosen is not None
    assert set(CORE_STREAMED) <= budget.chosen
    assert len(budget.chosen) < len(planned)
    assert "by estimate" in budget.reason


def test_an_estimate_below_the_budget_chooses_everything() -> None:
    budget = Budget(100, FakeClock())
    planned = planned_with(budget)
    budget.choose(planned, 50)
    assert budget.chosen is not None
    assert {row.name for row, _ in planned} | {"scaled weights"} <= budget.chosen


def report_after(seconds: float, core_seconds: float, *left: str) -> Report:
    """A report of a verification with a budget."""
    clock = FakeClock()
    budget = Budget(seconds, clock, left=dict.fromkeys(left))
    clock.now += core_seconds
    budget.record(CORE[0], 10, core_seconds)
    report = Report("model", "model", "quick")
    record_budget(report, budget)
    return report


def test_a_slow_core_is_a_note_with_the_excess() -> None:
    report = report_after(60, 74)
    assert report.notes == ["the mandatory scenarios ended 74.0 s after the start, 14.0 s beyond the budget of 60 s"]
    assert not report.unseen


def test_what_was_left_out_is_counted_in_the_summary_which_is_one_line() -> None:
    report = report_after(60, 5, "batch of 6", "second turn")
    assert not report.notes
    assert report.summary().endswith(
        "; could not have found: faults that only 2 scenarios left out by the budget of 60 s show"
    )
    assert "\n" not in report.summary()


def test_the_report_records_the_order_and_the_time() -> None:
    assert report_after(60, 5, "batch of 6").as_dict()["budget"] == {
        "seconds": 60,
        "used": 5.0,
        "ran": [{"name": CORE[0], "seconds": 5.0}],
        "not_run": ["batch of 6"],
    }
    assert "budget" not in Report("model", "model", "quick").as_dict()
