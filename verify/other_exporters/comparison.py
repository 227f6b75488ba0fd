"""The scenarios on foreign graphs beside the eager model, as they are and on scaled weights."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from llmconv.runtime.onnxruntime.runner import SessionSettings
from llmconv.tensors import LazyTensor
from llmconv.verify.comparison.run import skipped
from llmconv.verify.other_exporters.candidates import check_foreign, foreign_candidates
from llmconv.verify.other_exporters.graph_file import GraphFile
from llmconv.verify.other_exporters.scaled_weights import scaled_foreign, why_no_scaling
from llmconv.verify.other_exporters.session import ForeignGraph, Model
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.weight_scaling import (
    SCALED_SCENARIOS,
    SCALINGS,
    WeightScaling,
    scalings,
    unreached_checks,
)
from llmconv.verify.results.evidence import Evidence
from llmconv.verify.results.measure import GATES
from llmconv.verify.results.report import Check, Checks, Report
from llmconv.verify.scenarios.selection import Selection


@dataclass(frozen=True)
class ForeignComparison:
    """What foreign graphs are compared by.

    Attributes:
        facts: of the model, which graphs may leave open.
        settings: of onnxruntime.
        tensors: of the model.
        selection: the scenarios.
        report: receives evidence and notes; the checks are yielded.
    """

    facts: Model
    settings: SessionSettings
    tensors: Mapping[str, LazyTensor]
    selection: Selection
    report: Report

    def run(self, eager: Eager, files: Sequence[GraphFile], named: str = "") -> Checks:
        """All scenarios, then a few on scaled weights.

        Args:
            eager: the model.
            files: of the graphs, or of copies.
            named: what the scenarios' names end with.
        """
        eager.begin()
        if graphs := (yield from self.opened(files)):
            yield from self.compare(eager, graphs, named=named)
            yield from self.compare_scaled(eager, files, named)

    def opened(
        self, files: Sequence[GraphFile], change: WeightScaling | None = None
    ) -> Generator[list[Check], None, list[ForeignGraph]]:
        """All graphs, or their twins; none, and a failed check, where one cannot be opened."""
        settings = [scaled_foreign(self.settings, f, self.tensors, change) if change else self.settings for f in files]
        opened = [file.open(self.facts, own) for file, own in zip(files, settings, strict=True)]
        yield [graph for graph in opened if isinstance(graph, Check)]
        graphs = [graph for graph in opened if isinstance(graph, ForeignGraph)]
        return graphs if len(graphs) == len(opened) else []

    def compare(
        self,
        eager: Eager,
        graphs: Sequence[ForeignGraph],
        change: WeightScaling | None = None,
        named: str = "",
        few: bool = False,
    ) -> Checks:
        """All scenarios on every graph that can begin alone, and on two together; or `few`, as of twins."""
        found = foreign_candidates(graphs)
        evidence, repeat = self.report.evidence, self.selection.repeat
        if not (change or few or named):
            yield skipped(self.selection, eager, [candidate.name for candidate in found])
        for scenario, chains in self.selection.calls(eager.facts()):
            if (change or few) and scenario.name not in SCALED_SCENARIOS:
                continue
            row = change.scenario(scenario) if change else scenario
            truths = eager.expected_outputs(row, chains)
            row = replace(row, name=f"{row.name}{named}")
            for candidate in found:
                if len(candidate.foreign) == 1 or any(len(chain) > 1 for chain in chains):
                    seen = Evidence() if change else evidence.setdefault(f"{candidate.name}{named}", Evidence())
                    yield check_foreign(row, chains, candidate, truths, eager, GATES[eager.dtype], seen, repeat)

    def compare_scaled(self, eager: Eager, files: Sequence[GraphFile], named: str = "") -> Checks:
        """A few scenarios on scaled weights; what cannot be run is skipped, and counted."""
        rows = [row for row in self.selection.scenarios() if row.name in SCALED_SCENARIOS]
        reasons = [why_no_scaling(file.contents, file.found, self.tensors) for file in files]
        reason = next(filter(None, reasons), "")
        if reason:
            names = [(f"{c.scenario(row).name}{named}", file.name) for c in SCALINGS for row in rows for file in files]
            yield [Check(*name, "logits", verdict="skip", detail=reason) for name in names]
            self.report.unseen += [change.bug for change in SCALINGS] if rows else []
        elif rows:
            for change in scalings(eager):
                if graphs := (yield from self.opened(files, change)):
                    scaled = eager.scaled(change)
                    yield from self.compare(scaled, graphs, change, named)
                    scaled.release()
            checks = unreached_checks(eager, [file.name for file in files])
            self.report.unseen += ["limits that no run reaches"] if checks else []
            yield checks
