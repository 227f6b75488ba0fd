"""The scenarios on foreign graphs beside the eager model, as they are and on scaled weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from llmconv.runtime.onnxruntime.runner import SessionSettings
from llmconv.tensors import LazyTensor
from llmconv.verify.comparison.run import skipped
from llmconv.verify.other_exporters.candidates import check_external, external_candidates
from llmconv.verify.other_exporters.graph_file import GraphFile
from llmconv.verify.other_exporters.scaled_weights import scaled_settings, why_not_scalable
from llmconv.verify.other_exporters.session import ExternalGraph, ModelSizes
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.weight_scaling import CHANGES, Change, changes, unreached_checks
from llmconv.verify.reference.weight_scaling import SCENARIOS as TWIN_SCENARIOS
from llmconv.verify.results.evidence import Evidence
from llmconv.verify.results.measure import GATES
from llmconv.verify.results.report import Check, Report
from llmconv.verify.scenarios.table import chosen, scenarios

OnChecks = Callable[[list[Check]], None]


@dataclass(frozen=True)
class ExternalComparison:
    """What foreign graphs are compared by.

    Attributes:
        facts: of the model, which graphs may leave open.
        settings: of onnxruntime.
        tensors: of the model.
        report: says which scenarios, and how often.
        add: takes the checks.
    """

    facts: ModelSizes
    settings: SessionSettings
    tensors: Mapping[str, LazyTensor]
    report: Report
    add: OnChecks

    def run(self, eager: Eager, files: Sequence[GraphFile], named: str = "") -> None:
        """All scenarios, then a few on scaled weights.

        Args:
            eager: the model.
            files: of the graphs, or of copies.
            named: what the scenarios' names end with.
        """
        eager.begin()
        if graphs := self.opened(files):
            self.compare(eager, graphs, named=named)
            self.compare_twins(eager, files, named)

    def opened(self, files: Sequence[GraphFile], change: Change | None = None) -> list[ExternalGraph]:
        """All graphs, or their twins; none, and a failed check, where one cannot be opened."""
        settings = [scaled_settings(self.settings, f, self.tensors, change) if change else self.settings for f in files]
        opened = [file.open(self.facts, own) for file, own in zip(files, settings, strict=True)]
        self.add([graph for graph in opened if isinstance(graph, Check)])
        graphs = [graph for graph in opened if isinstance(graph, ExternalGraph)]
        return graphs if len(graphs) == len(opened) else []

    def compare(
        self,
        eager: Eager,
        graphs: Sequence[ExternalGraph],
        change: Change | None = None,
        named: str = "",
        few: bool = False,
    ) -> None:
        """All scenarios on every graph that can begin alone, and on two together; or `few`, as of twins."""
        found = external_candidates(graphs)
        report, repeat = self.report, self.report.settings["repeat"]
        if not (change or few or named):
            self.add(skipped(report, eager, [candidate.name for candidate in found]))
        for scenario, chains in scenarios(report.suite, eager.facts(), tuple(report.settings["seeds"])):
            if (change or few) and scenario.name not in TWIN_SCENARIOS:
                continue
            row = change.scenario(scenario) if change else scenario
            truths = eager.truths(row, chains)
            row = replace(row, name=f"{row.name}{named}")
            for candidate in found:
                if len(candidate.external) == 1 or any(len(chain) > 1 for chain in chains):
                    seen = Evidence() if change else report.evidence.setdefault(f"{candidate.name}{named}", Evidence())
                    self.add(check_external(row, chains, candidate, truths, eager, GATES[eager.dtype], seen, repeat))

    def compare_twins(self, eager: Eager, files: Sequence[GraphFile], named: str = "") -> None:
        """A few scenarios on scaled weights; what cannot be run is skipped, and counted."""
        asked = chosen(self.report.suite, tuple(self.report.settings["seeds"]))
        rows = [row for row in asked if row.name in TWIN_SCENARIOS]
        reasons = [why_not_scalable(file.contents, file.quantized_weights, self.tensors) for file in files]
        reason = next(filter(None, reasons), "")
        if reason:
            names = [(f"{c.scenario(row).name}{named}", file.name) for c in CHANGES for row in rows for file in files]
            self.add([Check(*name, "logits", verdict="skip", detail=reason) for name in names])
            self.report.unseen += [change.bug for change in CHANGES] if rows else []
        elif rows:
            for change in changes(eager):
                if graphs := self.opened(files, change):
                    twin = eager.twin(change)
                    self.compare(twin, graphs, change, named)
                    twin.release()
            checks = unreached_checks(eager, [file.name for file in files])
            self.report.unseen += ["limits that no run reaches"] if checks else []
            self.add(checks)
