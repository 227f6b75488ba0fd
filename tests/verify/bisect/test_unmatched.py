"""Nodes whose values the model does not compute are listed: what no scenario reaches stands in the list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from llmconv.verify import Report, verify, verify_graphs
from llmconv.verify.reference.eager import Eager
from llmconv.verify.report.files import render_json
from llmconv.verify.report.html import render_html
from llmconv.verify.results import UnmatchedNode
from tests.builders.mutants.hidden_triggers import HIDDEN
from tests.builders.mutants.trigger_nodes import Nodes, Trigger
from tests.builders.mutants.triggers_by_surgery import TRIGGERS
from tests.verify.conftest import decode_only

Tiny = Callable[[str], Path]
CALLS = ["prefill, 7 tokens", "decode chain, 16 steps"]
QUICK = ("position equal", "inside an if", "by a rotary table", "hidden clipped")
BY_NAME = {trigger.name: trigger for trigger in (*TRIGGERS, *HIDDEN)}


@pytest.fixture
def listed(exported: Tiny, eager: Callable[[str], Eager], tmp_path: Path) -> Callable[[Trigger | None], Report]:
    """`listed(trigger)` is the report of the tiny llama whose decode graph has that trigger, or none."""

    def report(trigger: Trigger | None) -> Report:
        folder = decode_only(exported("llama"), tmp_path / (trigger.name if trigger else "clean"))
        model = onnx.load(folder / "decode.onnx", load_external_data=False)
        if trigger:
            trigger.apply(Nodes(model))
        onnx.save(model, folder / "decode.onnx")
        return verify(folder, reference=exported("llama"), eager=eager("llama"), scenario=CALLS, bisect=True)

    return report


def kinds(nodes: list[UnmatchedNode]) -> set[tuple[str, str]]:
    """Operators and the ends of their modules' names."""
    return {(one.operator, one.scope.rpartition(".")[2]) for one in nodes}


@pytest.mark.slow
def test_a_correct_graph_has_only_steps_that_exporters_write_differently(
    listed: Callable[[Trigger | None], Report],
) -> None:
    report = listed(None)
    found = kinds(report.unmatched["decode.onnx"])
    assert found == {("Sigmoid", "act_fn")}
    assert any(" of " in note and "4 Sigmoid in `model.layers.#.mlp.act_fn`" in note for note in report.notes)


def added(name: str, listed: Callable[[Trigger | None], Report]) -> set[str]:
    """What a trigger adds to the list."""
    clean, triggered = (listed(one).unmatched["decode.onnx"] for one in (None, BY_NAME[name]))
    return {one.node for one in triggered} - {one.node for one in clean}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_the_nodes_of_a_trigger_are_in_the_list(name: str, listed: Callable[[Trigger | None], Report]) -> None:
    assert added(name, listed)


@pytest.mark.one_row_in(9)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {*QUICK}))
def test_the_nodes_of_any_trigger_are_in_the_list(name: str, listed: Callable[[Trigger | None], Report]) -> None:
    assert added(name, listed)


def test_the_list_is_in_the_report_and_on_the_page(listed: Callable[[Trigger | None], Report]) -> None:
    report = listed(None)
    assert '"operator": "Sigmoid"' in render_json(report, "")
    assert " nodes compute values that the model does not" in render_html(report, "")


def test_graphs_of_other_exporters_are_listed_too(exported: Tiny, eager: Callable[[str], Eager]) -> None:
    graph = exported("llama") / "decode.onnx"
    report = verify_graphs([graph], reference=exported("llama"), eager=eager("llama"), scenario=CALLS, bisect=True)
    assert ("Sigmoid", "act_fn") in kinds(report.unmatched["decode.onnx"])


@pytest.mark.slow
def test_a_graph_that_fills_buffers_is_a_note(
    optioned: Callable[..., Path], exported: Tiny, eager: Callable[[str], Eager]
) -> None:
    folder = optioned("llama", cache="shared-buffer")
    report = verify(folder, reference=exported("llama"), eager=eager("llama"), scenario=CALLS, bisect=True)
    assert not report.unmatched
    assert any("not listed for graphs that update fixed buffers in place" in note for note in report.notes)


@pytest.mark.slow
def test_without_bisect_the_quick_suite_lists_nothing(exported: Tiny, eager: Callable[[str], Eager]) -> None:
    assert not verify(exported("llama"), eager=eager("llama"), scenario=CALLS).unmatched
