"""What every verification shares, whichever exporter made the graphs: report, suites, the search after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmconv.errors import UsageProblem
from llmconv.runtime.onnxruntime.runner import SessionSettings
from llmconv.verify.bisect.minimize import require_new
from llmconv.verify.bisect.replay import Replayable
from llmconv.verify.bisect.search import name_node
from llmconv.verify.bisect.unmatched import list_unmatched
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.measure import GATES
from llmconv.verify.results.report import Check, Report
from llmconv.verify.scenarios.table import Scenario, chosen
from llmconv.version import __version__

OnChecks = Callable[[list[Check]], None]


LIBRARIES = ("numpy", "onnx", "onnxruntime", "torch", "transformers")


def look_closer(report: Report, verified: Replayable, eager: Eager | None, piece: Path | None, *, bisect: bool) -> None:
    """Searches for the node that differs, and lists the nodes that have no counterpart in the model, as asked for."""
    if bisect or piece:
        name_node(report, verified, eager, piece)
    if bisect or report.suite == "full":
        list_unmatched(report, verified, eager)


def new_piece(minimize: str | Path | None) -> Path | None:
    """The folder for the smallest piece that fails; refused with UsageProblem where it holds something."""
    piece = Path(minimize) if minimize else None
    if piece:
        require_new(piece)
    return piece


def new_report(name: str, suite: str, only: Sequence[str], repeat: int, settings: SessionSettings) -> Report:
    """A report without checks, which says what would have to be the same for the same report."""
    said = recorded(settings, chosen(suite, only), repeat)
    report = Report(name, name, suite, versions=library_versions(), settings=said)
    report.unseen += ["scenarios that were not asked for"] if only else []
    return report


def recorded(settings: SessionSettings, rows: Sequence[Scenario], repeat: int) -> dict[str, Any]:
    """What would have to be the same for the same report."""
    return {
        "threads": settings.threads,
        "optimization": settings.optimization,
        "repeat": repeat,
        "gates": {dtype: asdict(gate) for dtype, gate in GATES.items()},
        "seeds": {scenario.name: scenario.seed for scenario in rows},
    }


def collector(report: Report, on_checks: OnChecks | None) -> OnChecks:
    """What takes new checks: they join the report, and `on_checks` is told."""

    def add(checks: list[Check]) -> None:
        report.checks += checks
        if on_checks:
            on_checks(checks)

    return add


def require_suite(suite: str) -> None:
    """Refuses an unknown suite with UsageProblem."""
    if suite not in {"quick", "full"}:
        raise UsageProblem(f"suite `{suite}` is unknown", hint="give `quick` or `full`")


def library_versions() -> dict[str, str]:
    """Versions of what takes part in the verdict."""
    return {"llmconv": __version__, **{name: version(name) for name in LIBRARIES}}
