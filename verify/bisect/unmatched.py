"""Lists the nodes of a graph whose values the eager model does not compute in the same module.

Some of them are steps that an exporter writes differently, such as the square root inside a norm. The others may be
faults that no scenario reaches: comparisons, selections or factors that the model does not have.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from llmconv.errors import first_line
from llmconv.verify.bisect.agreement import ValueComparison
from llmconv.verify.bisect.agreement_trace import ARITHMETIC, CHOICES, LAYOUT_OPS, AgreementTrace, GraphIndex
from llmconv.verify.bisect.module_scopes import ModuleScopes
from llmconv.verify.bisect.replay import Replayable, ReplayedCall
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Report, UnmatchedNode, Where

CALLS = (("chunked prefill, pieces of 1 to 48 tokens", 1), ("decode chain, 16 steps", 1), ("prefill, 7 tokens", 0))
"""Scenarios and steps to compare values of; the first that a graph ran is used."""

MOVES = LAYOUT_OPS | {"Concat", "Slice", "Split"}
"""Operators that compute no new number."""

SHOWN = 4
"""Maximum number of kinds of nodes in a note."""

NOT_LISTED = "nodes without a counterpart in the model are not listed for graphs that update fixed buffers in place"


def list_unmatched(report: Report, verified: Replayable, eager: Eager | None) -> None:
    """Fills `report.unmatched` by graph, with a note for each; a graph that cannot be probed only gets a note.

    Args:
        report: of a verification.
        verified: replays one of its calls.
        eager: the reference; None if no graph could be run.
    """
    if eager is None or eager.is_layered or report.quantization:
        return
    for name, where in _calls(report):
        try:
            with verified.replayed(where, eager) as replay, np.errstate(all="ignore"):  # masks overflow when squared
                text = _listed(report, name, replay) if replay else NOT_LISTED
        except Exception as error:  # an error in the search must not change the verdict
            text = f"nodes without a counterpart in the model are not listed: {first_line(error)}"
        after = ", including those after the fault" if report.where and name in report.where.graph else ""
        report.notes.append(f"`{name}`: {text}{after}")


def _listed(report: Report, name: str, replay: ReplayedCall) -> str:
    report.unmatched[name] = unmatched_nodes(replay)
    return _text(report.unmatched[name], len(replay.probe.model.graph.node))


def _calls(report: Report) -> Iterator[tuple[str, Where]]:
    """One call for each graph that is not a copy of another."""
    for name in dict.fromkeys(check.graph for check in report.checks if check.name == "structure"):
        if name in report.copies:
            continue
        for scenario, step in CALLS:
            graphs = {check.graph for check in report.checks if check.name == scenario and check.output}
            of_step = [graph for graph in graphs if graph.split("+")[-1 if step else 0] == name]
            if of_step:
                yield name, Where(scenario, min(of_step, key=len), step, None, "logits", "")
                break


def unmatched_nodes(replay: ReplayedCall) -> list[UnmatchedNode]:
    """The unmatched nodes of one graph, in order; nodes that only change the layout are left out."""
    index = GraphIndex(replay.probe.model)
    scopes = ModuleScopes(name for name, _ in replay.model.named_modules())
    values = replay.probe.read(replay.feeds, [name for node in index.nodes for name in node.output])
    comparison = ValueComparison(replay.dtype, replay.call, replay.virtual)
    trace = AgreementTrace(
        index, scopes, values, replay.record(lambda scope: True), comparison, (), ARITHMETIC | CHOICES
    )
    return [
        UnmatchedNode(node.name, node.op_type, trace.scope(node))
        for node in index.nodes
        if not index.is_shape(node) and node.op_type not in MOVES and not trace.matched.intersection(node.output)
    ]


def _text(nodes: Sequence[UnmatchedNode], of: int) -> str:
    """`17 of 357 nodes compute what the model does not: 5 Sqrt in layers.#.input_layernorm, …`."""
    if not nodes:
        return f"each of {of} nodes has a counterpart in the model"
    kinds = Counter((node.operator, re.sub(r"\d+", "#", node.scope)) for node in nodes)
    listed = [f"{count} {operator} in `{scope or '?'}`" for (operator, scope), count in kinds.most_common(SHOWN)]
    more = [f"{len(kinds) - SHOWN} more kinds"] if len(kinds) > SHOWN else []
    return f"{len(nodes)} of {of} nodes have no counterpart in the model: {', '.join([*listed, *more])}"
