"""Compares the graphs of a folder with the eager model: all scenarios, scaled weights, other onnxruntime settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx

from llmconv.checkpoint import read_json
from llmconv.errors import LlmconvError, UnsupportedInput
from llmconv.export.rewrite.running_form import to_running_form
from llmconv.output.manifest import EMBEDDINGS, VISION, GraphEntry
from llmconv.runtime.extra_inputs import INPUTS_EMBEDS, ModelCall
from llmconv.runtime.images.families import family_in
from llmconv.runtime.onnxruntime.graph import EmbeddingGraph, OrtGraph, VisionGraph
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import CPU, HALF_PRECISION, SessionSettings
from llmconv.runtime.runner import Cache, Extras, PlacedEmbeddings, Step, default_positions
from llmconv.tensors import BY_NAME
from llmconv.verify.audit.structure import check_structure, check_tower_norms, name_problems
from llmconv.verify.comparison.candidates import (
    Candidate,
    PrefillDecodeAgreement,
    candidates,
    check_scenario,
    fold,
    measured_rows,
)
from llmconv.verify.comparison.images import FEATURES, ImageChecks
from llmconv.verify.comparison.layer_by_layer import Scaler, precompute
from llmconv.verify.reference.eager import Eager, ExpectedOutputs, StartOf, check_own_cache, stored_start, trained_start
from llmconv.verify.reference.other_roundings import (
    SCALED_SCENARIOS,
    SCALINGS,
    WeightScaling,
    hidden_faults,
    outputs_of,
    scalings,
    unreached_checks,
)
from llmconv.verify.results import Check, Checks, Report, problem_of
from llmconv.verify.scenarios.calls import Call, Chain
from llmconv.verify.scenarios.selection import Budget, Named, Selection
from llmconv.verify.scenarios.table import Scenario
from llmconv.verify.sigma import GATES, Evidence, Gates, Measure, NoiseFloor, measure

OTHER_SETTINGS = (("disable", 1), ("basic", 2), ("extended", 1))

LAYERED = "skipped in layer-by-layer verification"

LAST_LOGITS = ("prefill, 7 tokens", "batch of 3")  # scenarios in which the last logits of prompts are asked for
AS_RUN = ", as run"  # suffix of the name of a graph in the form that `generate` runs
GraphOpener = Callable[[Path, GraphEntry, SessionSettings], OrtGraph]


class LastLogitsRunner(OrtRunner):
    """Asks for the last logits of all calls."""

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        return super()._run_prompt(replace(call, last_only=True), past, extras, placed)

    def _run_step(self, call: ModelCall, past: Cache | None, extras: Extras | None) -> Step:
        return super()._run_step(replace(call, last_only=True), past, extras)


@dataclass(frozen=True)
class FolderComparison:
    """The graphs of a folder and the eager model that they are compared with."""

    eager: Eager
    folder: Path
    # the graphs without their weights, by name, with the graph of the embedding table where there is one
    models: Mapping[str, onnx.ModelProto]
    settings: SessionSettings
    selection: Selection
    report: Report
    open_graph: GraphOpener
    named: str = ""  # suffix of the names of all checks
    varied: bool = True  # also compare with scaled weights and with other settings of onnxruntime
    routed: bool = False  # judge the calmest rows (`Gates.calmest`)
    # opens the graphs on scaled weights; default: on those that the files in `folder` are named after
    scaler: Scaler | None = None
    start: StartOf = trained_start  # computes a trained prefix, as `trained_start`

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
        yield [check_structure(one, self.models[one.name], shapes, extras, heeds_positions=heeds) for one in opened]
        yield check_own_cache(self.eager, [graph.name for graph in opened])
        graphs, copies = distinct(self.folder, [graph for graph in opened if not name_problems(graph, shapes, extras)])
        self.report.copies |= {name: first for first, names in copies.items() for name in names}
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
        fields, unseen = read_json(self.eager.folder / "config.json"), "faults of prompts with images"
        if fields.get("vision_config") and unseen not in self.report.unseen:
            self.report.unseen.append(unseen)
            self.report.notes.append("only text was verified: no graph computes their features")

    def _compare_images(self, graphs: list[OrtGraph]) -> Checks:
        if self.eager.is_layered:
            yield [Check(FEATURES, VISION, "", verdict="skip", detail=LAYERED)]
            self.report.unseen.append("faults of prompts with images")
            return
        try:
            vision, family = VisionGraph(self.folder / VISION, self.settings), family_in(self.eager.folder)
            if family is None:
                raise UnsupportedInput("the images of this type of model do not reach graphs", hint="remove the graph")
        except LlmconvError as error:
            yield [Check(FEATURES, VISION, "", verdict="fail", detail=problem_of(error))]
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
            forms = self._forms(of_prefix)
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
                for one in forms if found else ():
                    if not one.asks_last or scenario.name in LAST_LOGITS:
                        yield check_scenario(scenario, chains, one, truths, gates, PrefillDecodeAgreement(gates))
            yield from not_run(rows.left, self.selection.budget, [graph.name for graph in of_prefix])
            yield pair.checks()
        if self.eager.facts().no_edits:
            self.report.unseen.append("faults of caches that are changed between two calls")

    def _forms(self, graphs: list[OrtGraph]) -> list[Candidate]:
        """The graphs in the form that `generate` runs on the CPU, see `running_form`; those that have one.

        Where a form computes the logits that a call asks for, a second candidate asks for the last ones of prompts.
        """
        settings, change = self.settings, self.settings.change
        if self.named or settings.free_dimensions or settings.provider != CPU or self.eager.is_layered:
            return []

        rewritten: dict[str, set[str]] = {}

        def changed(path: Path, model: onnx.ModelProto) -> None:
            if change:
                change(path, model)
            before = Counter(node.op_type for node in model.graph.node)
            to_running_form(path, model)
            rewritten[path.name] = set(Counter(node.op_type for node in model.graph.node) - before)

        found = []
        for graph in graphs:
            if type(graph) is not OrtGraph or len(graph.entry.files) > 1:
                continue
            form = self.open_graph(self.folder, graph.entry, replace(settings, change=changed, garbage=True))
            name, new = f"{graph.name}{AS_RUN}", rewritten.get(graph.entry.files[0], set())
            if new - {"Slice"}:
                found.append(Candidate(name, OrtRunner(form, form), (form,)))
            if form.takes_start:
                last = f"{graph.name}, last logits{AS_RUN}"
                found.append(Candidate(last, LastLogitsRunner(form, form), (form,), asks_last=True))
        return found

    def _compare_scaled(self, originals: list[OrtGraph]) -> Checks:
        """A few scenarios on scaled weights; skipped checks where the weights cannot be scaled."""
        if entries := [graph.entry for graph in originals]:
            models = [self.models[entry.name] for entry in entries]
            scaler = self.scaler or Scaler.of(self.folder, self.eager.folder, models)
            # before the model is scaled: afterwards it would be read again
            layers = len(self.eager.cache_shapes()) // 2 if any(entry.prefix for entry in entries) else 0
            names = [entry.name for entry in entries]
            one = partial(self._compare_one_scaling, entries=entries, scaler=scaler, layers=layers)
            yield from compare_scaled(self.eager, self.selection, self.report, names, scaler.why_not, one)

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
        planned = [one for one in self.selection.calls(self.eager.facts()) if one[0].name == "left padding"]
        entries = [graph.entry for graph in originals if not graph.entry.prefix]
        if self.eager.is_layered:
            names = [f"{scenario.name}, other optimization and threads" for scenario, _ in planned]
            yield [Check(name, one.name, "logits", verdict="skip", detail=LAYERED) for name in names for one in entries]
            return
        for scenario, chains in planned:
            variants = [(OtherSettings(scenario, *one), chains) for one in OTHER_SETTINGS]
            for row, _ in (rows := self.selection.paced(variants, reopens=True)):
                other = replace(self.settings, optimization=row.optimization, threads=row.threads)
                graphs = yield from open_graphs(self.open_graph, self.folder, entries, other)
                named = replace(scenario, name=row.name, bug="optimum #978: wrong from one level of optimization on")
                yield from self._alone(named, chains, graphs, self.eager.expected_outputs(scenario, chains))
            yield from not_run(rows.left, self.selection.budget, [entry.name for entry in entries])

    def _alone(
        self, scenario: Scenario, chains: list[Chain], graphs: list[OrtGraph], truths: ExpectedOutputs
    ) -> Checks:
        gates = replace(GATES[self.eager.dtype], calmest=self.routed)
        for graph in graphs:
            candidate = Candidate(graph.name, OrtRunner(graph, graph), (graph,))
            seen = Evidence()
            yield check_scenario(scenario, chains, candidate, truths, gates, PrefillDecodeAgreement(gates), seen)
            self.report.evidence.setdefault(f"{graph.name}{self.named}", Evidence()).join_rows(seen)


def skipped(selection: Selection, eager: Eager, graphs: Sequence[str]) -> list[Check]:
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

    `opener` is `open_graph`, or `open_in_pieces` for layer-by-layer verification. Raises UnsupportedInput: a graph
    cannot be cut into pieces.
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
        except UnsupportedInput:
            raise
        except LlmconvError as error:
            yield [Check("structure", entry.name, "", verdict="fail", detail=problem_of(error))]
    return graphs


NAME = "own embeddings"
BATCH, TOKENS, SEED = 2, 6, 29


def check_own_embeddings(graph: OrtGraph, eager: Eager, gates: Gates) -> list[Check]:
    """One check per output, of two prompts in which most embeddings are random numbers of the table's size."""
    blank = Check(NAME, graph.name, "")
    call, placed = _call(eager)
    candidate = Candidate(graph.name, OrtRunner(graph, graph), (graph,))
    if reason := candidate.refuses(call):
        return [replace(blank, output="logits", verdict="skip", detail=reason)]
    given = call.input_ids, call.attention_mask, call.position_ids
    truths = eager.outputs_of(call, lambda model: model.prefill(*given, placed=placed))
    try:
        step = candidate.runner.prefill(*given, placed=placed)
    except LlmconvError as error:
        return [replace(blank, output="logits", verdict="fail", detail=problem_of(error))]
    rows = outputs_of(step)
    if step.choices is not None:
        rows.pop("logits")
    expected = {name: truth for name, truth in truths.items() if name in rows or step.choices is None}
    if candidate.last_logits and "logits" in expected:
        expected["logits"] = expected["logits"].last()
    return [fold(blank, name, [measured_rows(truth, rows.get(name), gates)], gates) for name, truth in expected.items()]


def _call(eager: Eager) -> tuple[Call, PlacedEmbeddings]:
    """A call of two rows, and random embeddings for all of their tokens but the first and the last."""
    random = np.random.default_rng(SEED)
    ids = random.integers(0, eager.facts().vocab_size, (BATCH, TOKENS))
    mask = np.ones_like(ids)
    table = eager.embed(ids)[0]
    where = np.zeros(ids.shape, dtype=bool)
    where[:, 1:-1] = True
    size = float(np.sqrt((table**2).mean()))
    rows = (size * random.standard_normal((int(where.sum()), table.shape[-1]))).astype(np.float32)
    if eager.dtype in HALF_PRECISION:  # the graph's input rounds them
        rows = rows.astype(BY_NAME[eager.dtype].numpy).astype(np.float32)
    return Call(ids, mask, default_positions(mask, TOKENS)), PlacedEmbeddings(where, rows)


@dataclass(frozen=True)
class OtherSettings:
    """A scenario with another level of graph optimization and number of threads of onnxruntime."""

    scenario: Scenario
    optimization: str
    threads: int

    @property
    def name(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.scenario.name}, optimization {self.optimization}, {threads}"


def compare_scaled(
    eager: Eager,
    selection: Selection,
    report: Report,
    graphs: Sequence[str],
    why_not: str,
    compare: Callable[[WeightScaling], Checks],
    named: str = "",
) -> Checks:
    """A few scenarios with each scaling, as `compare` compares them; skipped checks if the graphs cannot be scaled.

    `why_not` says why they cannot, empty if they can; `named` is a suffix of the scenarios' names.
    """
    rows = [row for row in selection.scenarios() if row.name in SCALED_SCENARIOS]
    if not rows:
        return
    if why_not:
        names = [f"{scaling.scenario(row).name}{named}" for scaling in SCALINGS for row in rows]
        yield [Check(name, graph, "logits", verdict="skip", detail=why_not) for name in names for graph in graphs]
        report.unseen += hidden_faults(SCALINGS, eager.folder)
        return
    few = replace(selection, only=SCALED_SCENARIOS, budget=None)
    planned = few.calls(eager.facts()) if selection.budget else []  # a budget counts the calls of each scaling
    chains = [chain for _, chains in planned for chain in chains]
    # later scalings depend on the limits that `eager` reached
    passes = selection.paced(((scaling, chains) for scaling in scalings(eager)), reopens=True)
    for scaling, _ in passes:
        yield from compare(scaling)
    left = [replace(row, name=f"{scaling.scenario(row).name}{named}") for scaling in passes.left for row in rows]
    yield from not_run(left, selection.budget, graphs)
    checks = unreached_checks(eager, graphs)
    report.unseen += hidden_faults(passes.left, eager.folder)
    report.unseen += ["a dropped limit that no run reaches"] if checks else []
    yield checks


def not_run(left: Iterable[Named], budget: Budget | None, graphs: Sequence[str]) -> Checks:
    """Skipped checks, one for every graph, of each row that the budget had no time for."""
    reason = budget.reason if budget else ""
    for row in left:
        yield [Check(row.name, name, "logits", verdict="skip", detail=reason) for name in graphs]


ROWS = 4096  # maximum number of compared tokens, evenly spread over the vocabulary


def takes_embeddings(models: Iterable[onnx.ModelProto]) -> bool:
    return any(port.name == INPUTS_EMBEDS for model in models for port in model.graph.input)


def check_embeddings(path: Path, eager: Eager, settings: SessionSettings | None) -> Check:
    """One check over tokens of the whole vocabulary of the graph of the embedding table."""
    blank = Check("embeddings", path.name, INPUTS_EMBEDS)
    count = eager.facts().vocab_size
    ids = np.unique(np.linspace(0, count - 1, min(ROWS, count), dtype=np.int64))[None]
    exact, rounded = eager.embed(ids)
    truth = NoiseFloor(eager.dtype).truth(INPUTS_EMBEDS, exact, rounded, np.ones(ids.shape, dtype=bool))
    try:
        found = measure(truth, EmbeddingGraph(path, settings).run(ids))
    except LlmconvError as error:
        found = Measure(problem=problem_of(error))
    return fold(blank, INPUTS_EMBEDS, [found], GATES[eager.dtype])


Result = TypeVar("Result")


def distinct(folder: Path, graphs: Sequence[OrtGraph]) -> tuple[list[OrtGraph], dict[str, list[str]]]:
    """The first graph of each content, and the names of its copies by its own name.

    Copies have the same bytes, and the same manifest entry except for the role.
    """
    kept, copies = distinct_entries(folder, [graph.entry for graph in graphs])
    names = {entry.name for entry in kept}
    return [graph for graph in graphs if graph.name in names], copies


def distinct_entries(folder: Path, entries: Sequence[GraphEntry]) -> tuple[list[GraphEntry], dict[str, list[str]]]:
    """The same of graphs that are not opened; arguments as for `distinct`."""
    firsts: dict[object, GraphEntry] = {}
    copies: dict[str, list[str]] = {}
    for entry in entries:
        first = firsts.setdefault(entry.content_key(folder), entry)
        if first is not entry:
            copies.setdefault(first.name, []).append(entry.name)
    return list(firsts.values()), copies


def with_copies(
    found: Generator[list[Check], None, Result], copies: dict[str, list[str]]
) -> Generator[list[Check], None, Result]:
    """The same checks, each followed by those of the graph's copies; returns what `found` returns."""
    while True:
        try:
            checks = next(found)
        except StopIteration as end:
            result: Result = end.value
            return result
        yield checks
        for first, names in copies.items():
            own = [check for check in checks if check.graph == first]
            yield from ([_of_copy(check, name) for check in own] for name in names)


def _of_copy(check: Check, name: str) -> Check:
    if check.verdict == "skip":  # for a reason that holds for both
        return replace(check, graph=name)
    note = f"the same bytes as {check.graph}"
    return replace(check, graph=name, detail="; ".join(part for part in (check.detail, note) if part))
