"""ExternalComparison: runs the scenarios on external graphs and the eager model, with original and scaled weights."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.tensors import LazyTensor
from llmconv.verify.comparison.run import skipped
from llmconv.verify.comparison.under_budget import not_run, scaled_rows
from llmconv.verify.other_exporters.candidates import check_external, external_candidates
from llmconv.verify.other_exporters.external_graph import ExternalGraph, ModelSizes
from llmconv.verify.other_exporters.graph_file import GraphFile
from llmconv.verify.other_exporters.scaled_weights import scaled_settings, why_not_scalable
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.weight_scaling import (
    SCALED_SCENARIOS,
    SCALINGS,
    WeightScaling,
    hidden_faults,
    unreached_checks,
)
from llmconv.verify.results.evidence import Evidence
from llmconv.verify.results.report import Check, Checks, Report
from llmconv.verify.results.sigma import GATES
from llmconv.verify.scenarios.selection import Selection


@dataclass(frozen=True)
class ExternalComparison:
    """The settings of a comparison; its methods yield checks.

    Attributes:
        sizes: sizes of the model, for graphs with dynamic axes.
        settings: session settings.
        tensors: tensors of the model by name.
        selection: the scenarios to run.
        report: collects evidence and notes.
    """

    sizes: ModelSizes
    settings: SessionSettings
    tensors: Mapping[str, LazyTensor]
    selection: Selection
    report: Report

    def run(self, eager: Eager, files: Sequence[GraphFile], named: str = "") -> Checks:
        """Compares all scenarios, then a few with scaled weights.

        Args:
            eager: the model.
            files: the graphs, or copies of them.
            named: suffix of the scenarios' names.
        """
        eager.begin()
        if graphs := (yield from self.opened(files)):
            yield from self.compare(eager, graphs, named=named)
            yield from self.compare_scaled(eager, files, named)

    def opened(
        self, files: Sequence[GraphFile], change: WeightScaling | None = None
    ) -> Generator[list[Check], None, list[ExternalGraph]]:
        """Opens all graphs, with scaled weights if given; if one fails, yields failed checks and returns none."""
        settings = [scaled_settings(self.settings, f, self.tensors, change) if change else self.settings for f in files]
        opened = [file.open(self.sizes, own) for file, own in zip(files, settings, strict=True)]
        yield [graph for graph in opened if isinstance(graph, Check)]
        graphs = [graph for graph in opened if isinstance(graph, ExternalGraph)]
        return graphs if len(graphs) == len(opened) else []

    def compare(
        self,
        eager: Eager,
        graphs: Sequence[ExternalGraph],
        change: WeightScaling | None = None,
        named: str = "",
        few: bool = False,
    ) -> Checks:
        """Compares all scenarios on every graph that can start a sequence, and on the pair of two graphs.

        Args:
            eager: the model.
            graphs: the opened graphs.
            change: the scaling of both.
            named: suffix of the scenarios' names.
            few: whether to run only the scenarios that are also run with scaled weights.
        """
        found = external_candidates(graphs)
        evidence, repeat = self.report.evidence, self.selection.repeat
        if not (change or few or named):
            yield skipped(self.selection, eager, [candidate.name for candidate in found])
        planned = self.selection.calls(eager.facts())
        if change or few:
            planned = [one for one in planned if one[0].name in SCALED_SCENARIOS]
        rows = (self.selection if not change else replace(self.selection, budget=None)).paced(planned)
        for scenario, chains in rows:
            row = change.scenario(scenario) if change else scenario
            truths = eager.expected_outputs(row, chains)
            row = replace(row, name=f"{row.name}{named}")
            for candidate in found:
                if len(candidate.external) == 1 or any(len(chain) > 1 for chain in chains):
                    seen = Evidence() if change else evidence.setdefault(f"{candidate.name}{named}", Evidence())
                    yield check_external(row, chains, candidate, truths, eager, GATES[eager.dtype], seen, repeat)
        left = [replace(row, name=f"{row.name}{named}") for row in rows.left]
        yield from not_run(left, self.selection.budget, [candidate.name for candidate in found])

    def compare_scaled(self, eager: Eager, files: Sequence[GraphFile], named: str = "") -> Checks:
        """Compares a few scenarios with scaled weights; yields skipped checks if that is not possible."""
        rows = [row for row in self.selection.scenarios() if row.name in SCALED_SCENARIOS]
        reasons = [why_not_scalable(file.contents, file.quantized_weights, self.tensors) for file in files]
        reason = next(filter(None, reasons), "")
        if reason:
            names = [(f"{c.scenario(row).name}{named}", file.name) for c in SCALINGS for row in rows for file in files]
            yield [Check(*name, "logits", verdict="skip", detail=reason) for name in names]
            self.report.unseen += hidden_faults(SCALINGS, eager.folder) if rows else []
        elif rows:
            for change, _ in (passes := self.selection.paced(scaled_rows(eager, self.selection), reopens=True)):
                if graphs := (yield from self.opened(files, change)):
                    scaled = eager.scaled(change)
                    yield from self.compare(scaled, graphs, change, named)
                    scaled.release()
            left = [replace(row, name=f"{change.scenario(row).name}{named}") for change in passes.left for row in rows]
            yield from not_run(left, self.selection.budget, [file.name for file in files])
            self.report.unseen += hidden_faults(passes.left, eager.folder)
            checks = unreached_checks(eager, [file.name for file in files])
            self.report.unseen += ["a dropped limit that no run reaches"] if checks else []
            yield checks
