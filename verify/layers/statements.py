"""Statements: the parts of an induction over layers, and which checks show each of them."""

from __future__ import annotations

from collections.abc import Callable

from llmconv.verify.layers.induction import LAYERS, PARTS, Induction
from llmconv.verify.layers.layer_checks import NAME, Drift
from llmconv.verify.results.report import Check, Report, Statement

AUDITS = ("graph file", "weights", "decisions", "structure", LAYERS, PARTS)


def statements(induction: Induction, report: Report, drift: Drift | None) -> list[Statement]:
    """The parts of the proof.

    Args:
        induction: the layers by class.
        report: its checks decide which parts were shown.
        drift: errors of the layers that ran by themselves; None if no numbers were compared.
    """
    graphs, count = len(induction.classes.graphs), len(induction.classes.names)
    found = [
        _shown(report, "structure", LAYERS, f"{count} layers of {_classes(len(induction.kept))}, alike node by node"),
        _shown(report, "weights", "weights", "each initializer is the tensor of the model in its place"),
        _shown(report, "composition", PARTS, "the parts are the file, and values cross only at the cuts"),
    ]
    if drift is not None:
        found += [_base(induction, report), _step(induction, report, drift, count)]
    per_graph = {check.graph for check in report.checks if check.name == LAYERS}
    return found if len(per_graph) == graphs else [Statement(one.name, False, one.text) for one in found]


def _shown(report: Report, name: str, check: str, text: str) -> Statement:
    return _of(report, name, lambda one: one.name == check and one.graph.endswith(".onnx"), text)


def _of(report: Report, name: str, belongs: Callable[[Check], bool], text: str) -> Statement:
    checks = [check for check in report.checks if belongs(check)]
    shown = any(check.verdict == "pass" for check in checks) and all(check.verdict != "fail" for check in checks)
    return Statement(name, shown, text)


def _base(induction: Induction, report: Report) -> Statement:
    kept = _numbers(induction.kept)
    scenarios = {check.name for check in report.checks if check.is_measured and not check.name.startswith(NAME)}
    text = f"{kept} (one of each class), with the parts before and after, in {len(scenarios)} scenarios"
    found = _of(report, "base", _is_scenario, text)
    compared = {name for one in report.checks if _is_scenario(one) for name in one.graph.split("+")}
    return found if induction.classes.graphs.keys() <= compared else Statement(found.name, False, found.text)


def _is_scenario(check: Check) -> bool:
    """Whether it compares outputs of a shortened graph."""
    return check.is_measured and not check.name.startswith(NAME)


def _step(induction: Induction, report: Report, drift: Drift, count: int) -> Statement:
    numbers = induction.run
    which = f"all {count} layers" if len(numbers) == count else f"{len(numbers)} of {count} layers"
    return _of(report, "step", lambda one: one.name.startswith(NAME), f"{which}, each by itself; {drift.text()}")


def _classes(count: int) -> str:
    return f"{count} class{'es' * (count > 1)}"


def _numbers(kept: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, kept[:6])) + (f" and {len(kept) - 6} more" if len(kept) > 6 else "")
    return f"layer{'s' * (len(kept) > 1)} {shown}"


def unseen_of(induction: Induction) -> list[str]:
    """What an induction cannot show."""
    left = len(induction.classes.names) - len(induction.run)
    found = ["rounding errors that grow from layer to layer"]
    return found + (
        [f"wrong numbers of {left} layer{'s' * (left > 1)}, whose weights alone were audited"] if left else []
    )
