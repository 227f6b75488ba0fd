"""The scenarios on foreign graphs beside the eager model, as they are and on scaled weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from llmconv.runtime.ort import SessionSettings
from llmconv.tensors import LazyTensor
from llmconv.verify.compare import GATES
from llmconv.verify.evidence import Evidence
from llmconv.verify.foreign.candidate import check_foreign, foreign_candidates
from llmconv.verify.foreign.files import GraphFile
from llmconv.verify.foreign.graph import ForeignGraph, Model
from llmconv.verify.foreign.twin import scaled_graph, why_no_scaling
from llmconv.verify.report import Check, Report
from llmconv.verify.scenarios import scenarios
from llmconv.verify.truth import Eager
from llmconv.verify.twin import CHANGES, Change
from llmconv.verify.twin import SCENARIOS as TWIN_SCENARIOS

OnChecks = Callable[[list[Check]], None]


@dataclass(frozen=True)
class ForeignComparison:
    """What foreign graphs are compared by.

    Attributes:
        facts: of the model, which graphs may leave open.
        settings: of onnxruntime.
        tensors: of the model.
        report: says which scenarios, and how often.
        add: takes the checks.
    """

    facts: Model
    settings: SessionSettings
    tensors: Mapping[str, LazyTensor]
    report: Report
    add: OnChecks

    def run(self, eager: Eager, files: Sequence[GraphFile], paths: Sequence[Path] | None = None) -> None:
        """All scenarios, then a few on scaled weights.

        Args:
            eager: the model.
            paths: copies to be opened in the place of the files.
        """
        paths = paths or [file.path for file in files]
        graphs = self._opened(files, paths)
        if graphs:
            self._compare(eager, graphs)
            self._compare_twins(eager, files, paths)

    def _opened(self, files: Sequence[GraphFile], paths: Sequence[Path]) -> list[ForeignGraph]:
        """All graphs, or none and a failed check."""
        opened = [file.open(self.facts, self.settings, path) for file, path in zip(files, paths, strict=True)]
        problems = [graph for graph in opened if isinstance(graph, Check)]
        self.add(problems)
        return [] if problems else [graph for graph in opened if isinstance(graph, ForeignGraph)]

    def _compare(self, eager: Eager, graphs: Sequence[ForeignGraph], change: Change | None = None) -> None:
        """All scenarios on every graph that can begin alone, and on two together; of twins a few."""
        found = foreign_candidates(graphs)
        report, repeat = self.report, self.report.settings["repeat"]
        for scenario, chains in scenarios(report.suite, eager.facts(), tuple(report.settings["seeds"])):
            if change and scenario.name not in TWIN_SCENARIOS:
                continue
            named = replace(scenario, name=f"{scenario.name}, {change.name}", bug=change.bug) if change else scenario
            truths = eager.truths(named, chains)
            for candidate in found:
                if len(candidate.foreign) == 1 or any(len(chain) > 1 for chain in chains):
                    seen = Evidence() if change else report.evidence.setdefault(candidate.name, Evidence())
                    self.add(check_foreign(named, chains, candidate, truths, eager, GATES[eager.dtype], seen, repeat))

    def _compare_twins(self, eager: Eager, files: Sequence[GraphFile], paths: Sequence[Path]) -> None:
        """A few scenarios on scaled weights."""
        reasons = [why_no_scaling(file.contents, file.found, self.tensors, self.report.suite) for file in files]
        if any(reasons):
            self.report.notes.append(f"no run on scaled weights: {next(filter(None, reasons))}")
            return
        for change in CHANGES:
            with ExitStack() as stack:
                copies = [
                    stack.enter_context(scaled_graph(path, file.contents, file.found, self.tensors, change))
                    for file, path in zip(files, paths, strict=True)
                ]
                graphs = self._opened(files, copies)
                if graphs:
                    self._compare(eager.twin(change), graphs, change)
