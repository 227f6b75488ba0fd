"""Compares the graphs of a folder with the eager model: all scenarios, scaled weights, other onnxruntime settings."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from llmconv.checkpoint import read_json
from llmconv.errors import LlmconvError, OutOfMemory, UnsupportedInput
from llmconv.runtime.images.families import family_in
from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS
from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.vision import VISION, VisionGraph
from llmconv.verify.audit.structure import check_structure, name_problems
from llmconv.verify.audit.tower_norms import check_tower_norms
from llmconv.verify.comparison.candidates import Candidate, PrefillDecodeAgreement, candidates, check_scenario
from llmconv.verify.comparison.embeddings import check_embeddings
from llmconv.verify.comparison.identical_files import distinct, with_copies
from llmconv.verify.comparison.images import FEATURES, ImageChecks
from llmconv.verify.comparison.layer_by_layer import precompute
from llmconv.verify.comparison.own_embeddings import check_own_embeddings
from llmconv.verify.comparison.scaled_weights import Scaler
from llmconv.verify.comparison.under_budget import OtherSettings, not_run, scaled_rows
from llmconv.verify.reference.eager import Eager, ExpectedOutputs
from llmconv.verify.reference.own_cache import check_own_cache
from llmconv.verify.reference.prefix import StartOf, stored_start, trained_start
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
from llmconv.verify.scenarios.calls import Chain
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.scenarios.table import Scenario

OTHER_SETTINGS = (("disable", 1), ("basic", 2), ("extended", 1))
OTHER_SETTINGS_SCENARIO = "left padding"
OTHER_SETTINGS_BUG = "optimum #978: wrong from one level of optimization on"

LAYERED = "skipped in layer-by-layer verification"

GraphOpener = Callable[[Path, GraphEntry, SessionSettings], OrtGraph]


@dataclass(frozen=True)
class FolderComparison:
    """The graphs of a folder and the eager model that they are compared with.

    Attributes:
        eager: the model.
        folder: the folder of the graphs.
        models: the graphs without their weights, by name, with the graph of the embedding table where there is one.
        settings: of onnxruntime.
        selection: the scenarios.
        report: receives evidence and notes; the checks are yielded.
        open_graph: opens a graph of the folder.
        named: suffix of the names of all checks.
        varied: also compare with scaled weights and with other settings of onnxruntime.
        routed: judge the calmest rows, see `Gates.calmest`.
        scaler: opens the graphs on scaled weights; default: on those that the files in `folder` are named after.
        start: computes a trained prefix, as `trained_start`.
    """

    eager: Eager
    folder: Path
    models: Mapping[str, onnx.ModelProto]
    settings: SessionSettings
    selection: Selection
    report: Report
    open_graph: GraphOpener
    named: str = ""
    varied: bool = True
    routed: bool = False
    scaler: Scaler | None = None
    start: StartOf = trained_start

    def checks(self, opened: Sequence[OrtGraph]) -> Checks:
        """All checks that need the eager model; graphs with unknown inputs are not run, identical files once."""
        for checks in self._checks(opened):
            yield [replace(check, name=f"{check.name}{self.named}") for check in checks]

    def _checks(self, opened: Sequence[OrtGraph]) -> Checks:
        self.eager.begin()
        if EMBEDDINGS in self.models:
            yield [check_embeddings(self.folder / EMBEDDINGS, self.eager, self.settings)]
        shapes = self.eager.cache_shapes()
        heeds = any(not graph.takes_positions for graph in opened) and self.eager.heeds_positions()
        extras = self.eager.extra_inputs
        yield [
            check_structure(graph, self.models[graph.name], shapes, extras, heeds_positions=heeds) for graph in opened
        ]
        yield check_own_cache(self.eager, [graph.name for graph in opened])
        graphs, copies = distinct(self.folder, [graph for graph in opened if not name_problems(graph, shapes, extras)])
        self.report.copies = {name: first for first, names in copies.items() for name in names}
        yield from with_copies(self._of_distinct(graphs), copies)

    def _of_distinct(self, graphs: list[OrtGraph]) -> Generator[list[Check], None, None]:
        yield from self._compare(graphs)
        if EMBEDDINGS in self.models and not self.eager.is_layered:
            gates = replace(GATES[self.eager.dtype], calmest=self.routed)
            yield from (check_own_embeddings(graph, self.eager, gates) for graph in graphs)
        if VISION in self.models:
            yield from self._compare_images(graphs)
        elif EMBEDDINGS in self.models:
            self._note_images()
        if self.varied:
            yield from self._compare_scaled(graphs)
            yield from self._compare_settings(graphs)

    def _note_images(self) -> None:
        """Notes that nothing was verified of a model's images, where it takes any."""
        from llmconv.export.families import MULTI_MODAL  # noqa: PLC0415 - the table alone

        fields, unseen = read_json(self.eager.folder / "config.json"), "faults of prompts with images"
        if fields.get("vision_config") and unseen not in self.report.unseen:
            self.report.unseen.append(unseen)
            limit = MULTI_MODAL.get(str(fields.get("model_type"))) or "no graph computes their features"
            self.report.notes.append(f"only text was verified: {limit}")

    def _compare_images(self, graphs: list[OrtGraph]) -> Checks:
        """Features of images, and prompts with images on all graphs."""
        if self.eager.is_layered:
            yield [Check(FEATURES, VISION, "", verdict="skip", detail=LAYERED)]
            self.report.unseen.append("faults of prompts with images")
            return
        try:
            vision, family = VisionGraph(self.folder / VISION, self.settings), family_in(self.eager.folder)
            if family is None:
                raise UnsupportedInput("the images of this type of model do not reach graphs", hint="remove the graph")
        except LlmconvError as error:
            yield [Check(FEATURES, VISION, "", verdict="fail", detail=error.message)]
            return
        checks = ImageChecks(vision, family, self.eager, replace(GATES[self.eager.dtype], calmest=self.routed))
        model = self.eager.eager_runners[0].model
        yield [checks.features(), check_tower_norms(VISION, self.models[VISION], model)]
        answers = [checks.answers(graph) for graph in graphs]
        yield from answers
        if all(check.verdict == "skip" for found in answers for check in found):
            self.report.unseen.append("faults of prompts with images")

    def _compare(self, graphs: list[OrtGraph]) -> Checks:
        """All scenarios on all graphs, each against the model after the graph's own prefix."""
        gates = replace(GATES[self.eager.dtype], calmest=self.routed)
        for prefix in dict.fromkeys(graph.entry.prefix for graph in graphs):
            pair = PrefillDecodeAgreement(gates)  # a graph after a prefix agrees with none without it
            truth = self.eager.with_prefix(prefix, self.start(self.folder, prefix)) if prefix else self.eager
            of_prefix = [graph for graph in graphs if graph.entry.prefix == prefix]
            planned = self.selection.calls(truth.facts())
            precompute(of_prefix, self.selection.chosen(planned))
            yield skipped(self.selection, truth, [graph.name for graph in of_prefix])
            rows = self.selection.paced(planned)
            for scenario, chains in rows:
                found = [candidate for candidate in candidates(graphs, chains) if candidate.prefix == prefix]
                truths = truth.expected_outputs(scenario, chains) if found else []
                for candidate in found:
                    evidence = self.report.evidence.setdefault(f"{candidate.name}{self.named}", Evidence())
                    yield check_scenario(
                        scenario, chains, candidate, truths, gates, pair, evidence, self.selection.repeat
                    )
            yield from not_run(rows.left, self.selection.budget, [graph.name for graph in of_prefix])
            yield pair.checks()
        if self.eager.facts().no_edits:
            self.report.unseen.append("faults of caches that are changed between two calls")

    def _compare_scaled(self, originals: list[OrtGraph]) -> Checks:
        """A few scenarios on scaled weights; skipped checks where the weights cannot be scaled."""
        entries = [graph.entry for graph in originals]
        rows = [row for row in self.selection.scenarios() if row.name in SCALED_SCENARIOS]
        if not entries or not rows:
            return
        models = [self.models[entry.name] for entry in entries]
        scaler = self.scaler or Scaler.of(self.folder, self.eager.folder, models)
        if scaler.why_not:
            yield _skip([scaling.scenario(row).name for scaling in SCALINGS for row in rows], entries, scaler.why_not)
            self.report.unseen += hidden_faults(SCALINGS, self.eager.folder)
            return
        layers = len(self.eager.cache_shapes()) // 2  # before the model is scaled: afterwards it would be read again
        planned = scaled_rows(self.eager, self.selection)
        for scaling, _ in (scaled := self.selection.paced(planned, reopens=True)):
            yield from self._compare_one_scaling(scaling, entries, scaler, layers)
        left = [scaling.scenario(row) for scaling in scaled.left for row in rows]
        yield from not_run(left, self.selection.budget, [entry.name for entry in entries])
        self.report.unseen += hidden_faults(scaled.left, self.eager.folder)
        checks = unreached_checks(self.eager, [entry.name for entry in entries])
        self.report.unseen += ["a dropped limit that no run reaches"] if checks else []
        yield checks

    def _compare_one_scaling(
        self, scaling: WeightScaling, entries: list[GraphEntry], scaler: Scaler, layers: int
    ) -> Checks:
        """Graphs and eager model with one scaling of the weights; one graph is open at a time."""
        scaled = self.eager.scaled(scaling)
        settings = scaler.scaled(self.settings, scaling)
        for prefix in dict.fromkeys(entry.prefix for entry in entries):
            truth = (
                scaled.with_prefix(prefix, stored_start(self.folder, prefix, layers)) if prefix else scaled
            )  # which keeps its results
            planned = [one for one in self.selection.calls(truth.facts()) if one[0].name in SCALED_SCENARIOS]
            truths = [truth.expected_outputs(scenario, chains) for scenario, chains in planned]
            scaled.release()  # before the graphs are opened, which map the weights again
            for entry in (entry for entry in entries if entry.prefix == prefix):
                graphs = yield from open_graphs(self.open_graph, self.folder, [entry], settings)
                precompute(graphs, planned)
                for (scenario, chains), known in zip(planned, truths, strict=True):
                    yield from self._alone(scaling.scenario(scenario), chains, graphs, known)

    def _compare_settings(self, originals: list[OrtGraph]) -> Checks:
        """One scenario with other graph optimization levels and thread counts of onnxruntime."""
        if self.selection.suite != "full":  # checked first: planning would load a released model again
            return
        planned = [one for one in self.selection.calls(self.eager.facts()) if one[0].name == OTHER_SETTINGS_SCENARIO]
        entries = [graph.entry for graph in originals if not graph.entry.prefix]
        if self.eager.is_layered:
            names = [f"{scenario.name}, other optimization and threads" for scenario, _ in planned]
            yield _skip(names, entries, LAYERED)
            return
        for scenario, chains in planned:
            variants = [(OtherSettings(scenario, *one), chains) for one in OTHER_SETTINGS]
            for row, _ in (rows := self.selection.paced(variants, reopens=True)):
                other = replace(self.settings, optimization=row.optimization, threads=row.threads)
                graphs = yield from open_graphs(self.open_graph, self.folder, entries, other)
                named = replace(scenario, name=row.name, bug=OTHER_SETTINGS_BUG)
                yield from self._alone(named, chains, graphs, self.eager.expected_outputs(scenario, chains))
            yield from not_run(rows.left, self.selection.budget, [entry.name for entry in entries])

    def _alone(
        self, scenario: Scenario, chains: list[Chain], graphs: list[OrtGraph], truths: ExpectedOutputs
    ) -> Checks:
        """One scenario on each graph alone."""
        gates = replace(GATES[self.eager.dtype], calmest=self.routed)
        for graph in graphs:
            candidate = Candidate(graph.name, OrtRunner(graph, graph), (graph,))
            seen = Evidence()
            yield check_scenario(scenario, chains, candidate, truths, gates, PrefillDecodeAgreement(gates), seen)
            self.report.evidence.setdefault(f"{graph.name}{self.named}", Evidence()).join_rows(seen)


def _skip(names: Iterable[str], entries: Iterable[GraphEntry], why: str) -> list[Check]:
    """Checks of scenarios that are not run on some graphs."""
    graphs = [entry.name for entry in entries]
    return [Check(name, graph, "logits", verdict="skip", detail=why) for name in names for graph in graphs]


def skipped(selection: Selection, eager: Eager, graphs: Sequence[str]) -> list[Check]:
    """A skipped check for every graph and every scenario that is not run in full.

    Args:
        selection: of scenarios.
        eager: the reference.
        graphs: names of the graphs.
    """
    reasons = selection.left_out(eager.facts())
    return [
        Check(scenario.name, name, "logits", verdict="skip", detail=reason)
        for scenario, reason in reasons
        for name in graphs
    ]


def open_graphs(
    opener: GraphOpener, folder: Path, entries: Iterable[GraphEntry], settings: SessionSettings
) -> Generator[list[Check], None, list[OrtGraph]]:
    """Yields a failed check for each graph that onnxruntime cannot open; returns the others.

    Args:
        opener: `open_graph`, or `open_in_pieces` for layer-by-layer verification.
        folder: the folder of the graphs.
        entries: the graphs.
        settings: of onnxruntime.

    Raises:
        UnsupportedInput: a graph cannot be cut into pieces.
    """
    graphs: list[OrtGraph] = []
    shared: dict[object, OrtGraph] = {}
    for entry in entries:
        key = entry.content_key(folder)
        try:
            known = shared.get(key)
            graphs.append(known.under(entry) if known else opener(folder, entry, replace(settings, garbage=True)))
            if type(graphs[-1]) is OrtGraph:  # a graph in pieces keeps results under its own name
                shared[key] = graphs[-1]
        except (UnsupportedInput, OutOfMemory):
            raise
        except LlmconvError as error:
            yield [Check("structure", entry.name, "", verdict="fail", detail=error.message)]
    return graphs
