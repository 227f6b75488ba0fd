"""The frame of every verification: common options, the report that collects the checks, the search after a failure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from llmconv.memory import reporting_out_of_memory
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify.bisect.first_wrong_node import list_unmatched, localize, name_node, require_new
from llmconv.verify.bisect.replay import Replayable
from llmconv.verify.layers.layer_checks import narrowed
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import WHOLE, Check, Checks, Report
from llmconv.verify.scenarios.selection import Budget, Selection
from llmconv.verify.sigma import GATES
from llmconv.version import __version__

OnChecks = Callable[[list[Check]], None]

Checking: TypeAlias = Generator[list[Check], None, tuple[Eager | None, Replayable]]
"""Yields checks as they are made; returns the reference (None where no graph could be run) and the verified graphs."""

LIBRARIES = ("numpy", "onnx", "onnxruntime", "torch", "transformers")


@dataclass(frozen=True)
class Session:
    """The options that `verify` and `verify_graphs` share."""

    selection: Selection
    settings: SessionSettings
    on_checks: OnChecks | None  # called with each list of checks when it is made
    bisect: bool  # search for the first node that differs
    minimized: Path | None  # a new folder for the smallest failing piece; None for none

    @classmethod
    def of(
        cls,
        selection: Selection,
        settings: SessionSettings | None,
        on_checks: OnChecks | None,
        *,
        bisect: bool,
        minimize: str | Path | None,
    ) -> Session:
        """The options of a call of `verify`; refused with UsageProblem where the folder `minimize` is not empty."""
        minimized = Path(minimize) if minimize else None
        if minimized:
            require_new(minimized)
        return cls(selection, settings or SessionSettings(), on_checks, bisect, minimized)

    def new_report(self, name: str) -> Report:
        """An empty report, with the settings needed to reproduce it; `name` is that of the folder or the graphs."""
        settings = {
            "threads": self.settings.threads,
            "optimization": self.settings.optimization,
            "repeat": self.selection.repeat,
            **({"budget": budget.seconds} if (budget := self.selection.budget) else {}),
            "gates": {dtype: asdict(gate) for dtype, gate in GATES.items()},
            "seeds": {scenario.name: scenario.seed for scenario in self.selection.scenarios()},
        }
        report = Report(name, name, self.selection.suite, versions=library_versions(), settings=settings)
        report.unseen += ["faults that only other scenarios show"] if self.selection.only else []
        return report

    def run(
        self, report: Report, checking: Checking, decisive: Callable[[list[Check]], list[Check]] | None = None
    ) -> Report:
        """Collects all checks in the report, then searches for differences as far as the options ask for it.

        `decisive` selects the checks that locate a failure, by default all. Returns the same report.
        """
        with reporting_out_of_memory(f"while `{report.folder}` was verified"):
            eager, verified = self._collect(report, checking)
            record_budget(report, self.selection.budget)
            where = localize(decisive(report.checks) if decisive else report.checks)
            report.where = where if report.method == WHOLE else narrowed(where, report)
            if self.bisect or self.minimized:
                name_node(report, verified, eager, self.minimized)
            if self.bisect or report.suite == "full":
                list_unmatched(report, verified, eager)
        return report

    def _collect(self, report: Report, checking: Checking) -> tuple[Eager | None, Replayable]:
        while True:
            try:
                checks = next(checking)
            except StopIteration as end:
                eager, verified = end.value
                return eager, verified
            self._add(report, checks)

    def collect(self, report: Report, checking: Checks) -> None:
        """Adds all checks to the report when they are made."""
        for checks in checking:
            self._add(report, checks)

    def _add(self, report: Report, checks: list[Check]) -> None:
        report.checks += checks
        if self.on_checks:
            self.on_checks(checks)


def library_versions() -> dict[str, str]:
    """Versions of llmconv and the libraries that take part in the verdict, by name, as the modules say them.

    `onnxruntime-gpu` is the module `onnxruntime`, and both packages may be installed.
    """
    return {"llmconv": __version__, **{name: str(import_module(name).__version__) for name in LIBRARIES}}


def record_budget(report: Report, budget: Budget | None) -> None:
    """Adds how the time was used, a note if the mandatory scenarios took longer, and the number of rows left out."""
    if budget is None:
        return
    used, limit = budget.used, f"the budget of {budget.seconds:g} s"
    ran = [{"name": name, "seconds": seconds} for name, seconds in budget.ran]
    report.budget = {"seconds": budget.seconds, "used": round(used, 3), "ran": ran, "not_run": list(budget.left)}
    if (over := budget.core_seconds - budget.seconds) > 0:
        kind = "mandatory" if budget.chosen is None else "chosen"  # which run all at once
        end = f"{budget.core_seconds:.1f} s after the start, {over:.1f} s beyond {limit}"
        report.notes.append(f"the {kind} scenarios ended {end}")
    if count := len(budget.left):
        report.unseen.append(
            f"faults that only {count} scenario{'s' * (count > 1)} left out by {limit} show{'s' * (count == 1)}"
        )
