"""Comparison: the graphs of a folder beside one eager model: all scenarios, scaled weights, other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from llmconv.errors import LlmconvError, OutOfMemory, UnsupportedInput
from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.runtime.onnxruntime.runner import OrtGraph, OrtRunner, SessionSettings, open_graph
from llmconv.verify.audit.structure import check_structure, name_problems
from llmconv.verify.comparison.candidates import Agreement, Candidate, candidates, check_scenario
from llmconv.verify.comparison.embeddings import check_embeddings
from llmconv.verify.comparison.identical_files import adding_copies, distinct
from llmconv.verify.comparison.layer_by_layer import StreamedEager, foresee, open_in_pieces
from llmconv.verify.comparison.scaled_weights import scaled_settings, why_no_twin
from llmconv.verify.reference.eager import Eager, Truths
from llmconv.verify.reference.prefix import stored_start, trained_start
from llmconv.verify.reference.weight_scaling import CHANGES, Change, changes, unreached_checks
from llmconv.verify.reference.weight_scaling import SCENARIOS as TWIN_SCENARIOS
from llmconv.verify.results.evidence import Evidence
from llmconv.verify.results.measure import GATES
from llmconv.verify.results.report import Check, Report
from llmconv.verify.scenarios.calls import Chain
from llmconv.verify.scenarios.table import Scenario, chosen, left_out, scenarios

OTHER_SETTINGS = (("disable", 1), ("basic", 2), ("extended", 1))
OTHER_SETTINGS_SCENARIO = "left padding"
OTHER_SETTINGS_BUG = "optimum #978: wrong from one level of optimisation on"

LAYERED = "left out layer by layer"

Add = Callable[[list[Check]], None]


@dataclass(frozen=True)
class Comparison:
    """What graphs are compared by.

    Attributes:
        eager: the model.
        folder: of the graphs.
        models: the graphs without their weights, by name; the embedding table too, where there is one.
        settings: of onnxruntime.
        report: says which scenarios, and how often.
        add: takes the checks.
    """

    eager: Eager
    folder: Path
    models: Mapping[str, onnx.ModelProto]
    settings: SessionSettings
    report: Report
    add: Add

    def run(self, opened: Sequence[OrtGraph]) -> None:
        """Everything that takes the eager model; graphs of another signature are not run, copies once."""
        self.eager.begin()
        if EMBEDDINGS in self.models:
            self.add([check_embeddings(self.folder / EMBEDDINGS, self.eager, self.settings)])
        shapes = self.eager.cache_shapes()
        heeds = any(not graph.takes_positions for graph in opened) and self.eager.heeds_positions()
        self.add([check_structure(graph, self.models[graph.name], shapes, heeds_positions=heeds) for graph in opened])
        graphs, copies = distinct(self.folder, [graph for graph in opened if not name_problems(graph, shapes)])
        self.report.copies = {name: first for first, names in copies.items() for name in names}
        once = replace(self, add=adding_copies(self.add, copies))
        once._compare(graphs)
        once._compare_twins(graphs)
        once._compare_settings(graphs)

    def _planned(self, eager: Eager) -> list[tuple[Scenario, list[Chain]]]:
        return scenarios(self.report.suite, eager.facts(), tuple(self.report.settings["seeds"]))

    def _compare(self, graphs: list[OrtGraph]) -> None:
        """All scenarios on all graphs, each against the model behind the graph's own prefix."""
        gates = GATES[self.eager.dtype]
        pair, repeat = Agreement(gates), self.report.settings["repeat"]
        for prefix in dict.fromkeys(graph.entry.prefix for graph in graphs):
            truth = self.eager.behind(prefix, trained_start(self.folder, prefix)) if prefix else self.eager
            planned = self._planned(truth)
            of_prefix = [graph for graph in graphs if graph.entry.prefix == prefix]
            foresee(of_prefix, planned)
            self.add(skipped(self.report, truth, [graph.name for graph in of_prefix]))
            for scenario, chains in planned:
                found = [candidate for candidate in candidates(graphs, chains) if candidate.prefix == prefix]
                truths = truth.truths(scenario, chains) if found else []
                for candidate in found:
                    evidence = self.report.evidence.setdefault(candidate.name, Evidence())
                    self.add(check_scenario(scenario, chains, candidate, truths, gates, pair, evidence, repeat))
        self.add(pair.checks())
        if isinstance(self.eager, StreamedEager):
            self.report.unseen.append("caches that are changed between two calls")

    def _compare_twins(self, originals: list[OrtGraph]) -> None:
        """A few scenarios on scaled weights; what cannot be run is skipped, and counted."""
        entries = [graph.entry for graph in originals]
        asked = chosen(self.report.suite, tuple(self.report.settings["seeds"]))
        rows = [row for row in asked if row.name in TWIN_SCENARIOS]
        if not entries or not rows:
            return
        reason = why_no_twin(self.folder, self.eager.folder, [self.models[entry.name] for entry in entries])
        layers = len(self.eager.cache_shapes()) // 2
        if reason:
            self._skip([change.scenario(row).name for change in CHANGES for row in rows], entries, reason)
            self.report.unseen += [change.bug for change in CHANGES]
            return
        for change in changes(self.eager):
            self._compare_twin(change, entries, layers)
        checks = unreached_checks(self.eager, [entry.name for entry in entries])
        self.report.unseen += ["limits that no run reaches"] if checks else []
        self.add(checks)

    def _skip(self, names: Iterable[str], entries: Iterable[GraphEntry], why: str) -> None:
        """Scenarios that are not run on some graphs."""
        graphs = [entry.name for entry in entries]
        self.add([Check(name, graph, "logits", verdict="skip", detail=why) for name in names for graph in graphs])

    def _compare_twin(self, change: Change, entries: list[GraphEntry], layers: int) -> None:
        """Graphs on weights of which some are scaled, and the eager model on the same; one graph at a time."""
        twin = self.eager.twin(change)
        settings = scaled_settings(self.settings, self.folder, change)
        for prefix in dict.fromkeys(entry.prefix for entry in entries):
            truth = twin.behind(prefix, stored_start(self.folder, prefix, layers)) if prefix else twin  # which stays
            planned = [one for one in self._planned(truth) if one[0].name in TWIN_SCENARIOS]
            truths = [truth.truths(scenario, chains) for scenario, chains in planned]
            twin.release()  # before the graphs are opened, which map the weights once more
            for entry in (entry for entry in entries if entry.prefix == prefix):
                low_memory = isinstance(self.eager, StreamedEager)
                graphs = open_graphs(self.folder, [entry], settings, self.add, low_memory=low_memory)
                foresee(graphs, planned)
                for (scenario, chains), known in zip(planned, truths, strict=True):
                    self._alone(change.scenario(scenario), chains, graphs, known)

    def _compare_settings(self, originals: list[OrtGraph]) -> None:
        """One scenario as onnxruntime computes it when it optimises otherwise, with one thread and with two."""
        if self.report.suite != "full":  # asked first: to plan is to load a model that was released
            return
        planned = [one for one in self._planned(self.eager) if one[0].name == OTHER_SETTINGS_SCENARIO]
        entries = [graph.entry for graph in originals if not graph.entry.prefix]
        if isinstance(self.eager, StreamedEager):
            self._skip(
                [f"{scenario.name}, other optimisation and threads" for scenario, _ in planned], entries, LAYERED
            )
            return
        for scenario, chains in planned:
            for level, threads in OTHER_SETTINGS:
                name = f"{scenario.name}, optimisation {level}, {threads} thread{'s' * (threads > 1)}"
                named = replace(scenario, name=name, bug=OTHER_SETTINGS_BUG)
                other = replace(self.settings, optimization=level, threads=threads)
                graphs = open_graphs(self.folder, entries, other, self.add)
                self._alone(named, chains, graphs, self.eager.truths(scenario, chains))

    def _alone(self, scenario: Scenario, chains: list[Chain], graphs: list[OrtGraph], truths: Truths) -> None:
        """One scenario on every graph alone."""
        gates = GATES[self.eager.dtype]
        for graph in graphs:
            candidate = Candidate(graph.name, OrtRunner(graph, graph), (graph,))
            seen = Evidence()
            self.add(check_scenario(scenario, chains, candidate, truths, gates, Agreement(gates), seen))
            self.report.evidence.setdefault(graph.name, Evidence()).join_rows(seen)


def skipped(report: Report, eager: Eager, graphs: Sequence[str]) -> list[Check]:
    """A check for every scenario and graph of which something is left out."""
    reasons = left_out(report.suite, eager.facts(), tuple(report.settings["seeds"]))
    return [
        Check(scenario.name, name, "logits", verdict="skip", detail=reason)
        for scenario, reason in reasons
        for name in graphs
    ]


def paths_of(folder: Path, entries: Iterable[GraphEntry], models: Mapping[str, onnx.ModelProto]) -> list[Path]:
    """All graph files."""
    table = [folder / EMBEDDINGS] if EMBEDDINGS in models else []
    return [*(path for entry in entries for path in entry.paths(folder)), *table]


def open_graphs(
    folder: Path, entries: Iterable[GraphEntry], settings: SessionSettings, add: Add, *, low_memory: bool = False
) -> list[OrtGraph]:
    """The graphs that onnxruntime can open; the others are failed checks.

    Raises:
        UnsupportedInput: a graph cannot be cut into pieces.
    """
    graphs = []
    opened = open_in_pieces if low_memory else open_graph
    for entry in entries:
        try:
            graphs.append(opened(folder, entry, replace(settings, garbage=True)))
        except (UnsupportedInput, OutOfMemory):
            raise
        except LlmconvError as error:
            add([Check("structure", entry.name, "", verdict="fail", detail=error.message)])
    return graphs
