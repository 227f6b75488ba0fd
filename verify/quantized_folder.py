"""Compares quantized graphs of a folder with a model of the same codes, and their codes with the model's weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx

from llmconv.checkpoint import open_weights, read_json
from llmconv.errors import UnsupportedInput
from llmconv.output.manifest import MANIFEST, GraphEntry, PrefixEntry, read_manifest
from llmconv.quantized_weights.quantized_checkpoint import FIELD
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.extra_inputs import is_past
from llmconv.runtime.onnxruntime.graph import extra_names, open_graph
from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import HALF_PRECISION, SessionSettings
from llmconv.runtime.onnxruntime.shared_buffers import EMBEDDINGS, INPUTS_EMBEDS, WRITE_INDICES
from llmconv.verify.audit.decisions import audit_foreign_decisions, read_config
from llmconv.verify.audit.weights import NAME as GRAPH_FILE
from llmconv.verify.bisect.replay import Replayable, VerifiedFolder
from llmconv.verify.comparison.layer_by_layer import Scaler
from llmconv.verify.comparison.run import FolderComparison, distinct_entries, open_graphs, with_copies
from llmconv.verify.other_exporters.comparison import scaled_settings, why_not_scalable
from llmconv.verify.other_exporters.external_graph import MAX_GRAPHS, GraphFile, ModelSizes, read_graphs
from llmconv.verify.other_exporters.port_map import LLMCONV as MAP
from llmconv.verify.other_exporters.port_map import Binding, input_names
from llmconv.verify.other_exporters.quantized.audit import INT8, LEVEL
from llmconv.verify.other_exporters.quantized.dequantized_reference import (
    StoredSmoothing,
    dequantized_reference,
    plain_model,
    remove_rounding,
    tied_head,
    unstacked,
)
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants, attributes
from llmconv.verify.other_exporters.quantized.rounding_error import plainly_rounded
from llmconv.verify.other_exporters.quantized.schemes import quantized_operators
from llmconv.verify.other_exporters.quantized_verdict import QuantizationOptions, measure_cost, quantization_notes
from llmconv.verify.other_exporters.replay import ExternalGraphs
from llmconv.verify.other_exporters.run import audit_graph_weights, compare_graph_files, open_reference
from llmconv.verify.reference.cost_estimate import CostEstimate, choose
from llmconv.verify.reference.eager import Eager, PrefixStart, Start, trained_start
from llmconv.verify.reference.other_roundings import WeightScaling
from llmconv.verify.results import Check, Checks, Report
from llmconv.verify.verification import Checking, Session

OWN_INPUTS = {WRITE_INDICES, INPUTS_EMBEDS}


def is_quantized(models: Mapping[str, onnx.ModelProto]) -> bool:
    return any(map(quantized_operators, models.values()))


@dataclass(frozen=True)
class QuantizedFolder:
    """A folder of graphs with quantized weights, prefill and decode together.

    `reference` is the model before it was quantized, or the quantized model whose codes the graphs have.
    """

    verified: VerifiedFolder
    reference: Path
    report: Report
    session: Session
    options: QuantizationOptions

    def checks(self, eager: Eager | None, *, in_any_memory: bool = False) -> Checking:
        """All checks; InputRefused if the memory is too small, without `in_any_memory`."""
        verified = self.verified
        yield [*self._unrecorded(), *self._other_levels()]
        entries, copies = distinct_entries(verified.path, verified.entries)
        self.report.copies = {name: first for first, names in copies.items() for name in names}
        models = {name: model for name, model in verified.models.items() if name not in self.report.copies}
        if eager is None:
            estimate = CostEstimate.of_quantized(self.reference, len(entries))
            choose(estimate, False if in_any_memory else None, "quantized graphs are compared whole")
        once = replace(self, verified=replace(verified, entries=entries, models=models))
        return (yield from with_copies(once._of_distinct(eager), copies))

    def _of_distinct(self, eager: Eager | None) -> Checking:
        """All checks of graphs of which no two are the same bytes."""
        verified, report, session = self.verified, self.report, self.session
        result: tuple[Eager | None, Replayable] = (eager, verified)
        with ExitStack() as stack:
            plain = stack.enter_context(plain_model(self.reference))
            options = replace(self.options, codes=replace(self.options.codes, kept=plain.kept))
            if any(_is_own(verified, entry) for entry in verified.entries):
                own = replace(self, reference=plain.folder, options=options)
                return (yield from own._entries(eager, stack))
            for start in range(0, len(verified.entries), MAX_GRAPHS):
                paths = [verified.path / entry.files[0] for entry in verified.entries[start : start + MAX_GRAPHS]]
                tensors = unstacked(open_weights(plain.folder))
                graphs = ExternalGraphs(read_graphs(paths, MAP.name), ModelSizes({}), session.settings, tensors)
                result = yield from compare_graph_files(graphs, plain.folder, report, session, eager, options, stack)
        return result

    def _unrecorded(self) -> list[Check]:
        """A failed check of graphs that an export without quantization recorded, of a model without either."""
        as_recorded = [one.graph for one in self.report.checks if one.name == GRAPH_FILE and one.verdict == "pass"]
        if not self._is_exported or self.options.preset or not as_recorded:
            return []
        if read_json(self.reference / "config.json").get(FIELD):
            return []
        models = self.verified.models.values()
        operators = ", ".join(sorted({name for model in models for name in quantized_operators(model)}))
        detail = f"{operators}, but `{MANIFEST}` records an export without `quant` of a model without quantized weights"
        return [Check("structure", as_recorded[0], "", verdict="fail", detail=detail)]

    def _other_levels(self) -> list[Check]:
        """A failed check of each graph with products of another level than `export --quant` writes."""
        checks = []
        for name, model in self.verified.models.items() if self.options.preset and self._is_exported else ():
            products = [node for node in nodes(model) if node.op_type == "MatMulNBits"]
            levels = {attributes(node).get(LEVEL, 0): node for node in products}
            if other := [level for level in levels if level != INT8]:
                found = f"`{levels[other[0]].name or levels[other[0]].output[0]}` has {LEVEL} {other[0]}"
                detail = f"{found}; an export writes {INT8}"
                checks.append(Check("structure", name, "", verdict="fail", detail=detail))
        return checks

    @property
    def _is_exported(self) -> bool:
        return any(step.get("command") == "export" for step in read_manifest(self.verified.path).steps)

    def _entries(self, known: Eager | None, stack: ExitStack) -> Checking:
        """Audits of the graphs, the cost, then all scenarios; `reference` has plain weights."""
        verified, folder, report, options = self.verified, self.reference, self.report, self.options
        tensors = unstacked(open_weights(folder))
        if wrong := options.smoothing.check(verified.entries[0].name, tensors):
            yield wrong
            return known, verified
        tensors = options.smoothing.applied(tensors)
        graphs = ExternalGraphs(audited_files(verified), ModelSizes({}), verified.settings, tensors)
        yield from audit_graph_weights(graphs.files, tensors, read_json(folder / "config.json"), report, options.codes)
        config = read_config(folder)
        for name, model in verified.models.items():
            checks, notes = audit_foreign_decisions(name, model, config)
            yield checks
            report.notes += notes
        half = next((file.dtype for file in graphs.files if file.dtype in HALF_PRECISION), "")
        eager = open_reference(graphs, known or folder, half, options.code, stack)
        compared = QuantizedEntries(verified, graphs, eager, report, self.session, options)
        opened = yield from open_graphs(open_graph, verified.path, verified.entries, verified.settings)
        if len(opened) < len(verified.entries):
            return eager, verified
        yield from compared.cost()
        return (yield from compared.scenarios(stack, is_half=bool(half)))


def _is_own(compared: VerifiedFolder, entry: GraphEntry) -> bool:
    """Whether only llmconv's own runner runs a graph."""
    inputs = {port.name for port in compared.models[entry.name].graph.input}
    states = {name for name in inputs if is_past(name) and not MAP.fits(MAP.past, name)}  # of convolutions, recurrences
    own = inputs & OWN_INPUTS or extra_names(dict.fromkeys(inputs, ()))
    return bool(len(entry.files) > 1 or entry.postprocess or entry.prefix or states or own)


@dataclass(frozen=True)
class QuantizedEntries:
    """Audited graphs (`graphs`, with the model's tensors) that are compared with `eager`, the unquantized model."""

    verified: VerifiedFolder
    graphs: ExternalGraphs
    eager: Eager
    report: Report
    session: Session
    options: QuantizationOptions

    def cost(self) -> Checks:
        name, runner = shipped_runner(self.verified)
        prefix = next((entry.prefix for entry in self.verified.entries if entry.prefix), None)
        eager = self.eager.with_prefix(prefix, trained_start(self.verified.path, prefix)) if prefix else self.eager
        plain = partial(plainly_rounded_runner, self.verified, self.graphs, self.options.smoothing)
        suite = self.session.selection.suite
        if any(entry.postprocess for entry in self.verified.entries):
            self.report.notes.append("the cost is that of the logits from which the graphs choose tokens")
        yield from measure_cost((name, runner), plain, eager, self.options, self.report, suite, runner.cache_capacity)

    def scenarios(self, stack: ExitStack, *, is_half: bool) -> Checking:
        """All scenarios, against the model with the values of the codes, which `stack` keeps.

        If `is_half`, the graphs compute in half precision: original weights and settings only.
        """
        section, files, eager = self.report.quantization, self.graphs.files, self.eager
        assert section is not None
        rounded: set[str] = set()
        try:
            without = partial(_without_rounding, self.verified.path, rounded, self.options)
            verified = self.verified.changed(without, "")
        except UnsupportedInput as error:
            yield [Check("structure", files[0].name, "", verdict="skip", detail=error.message)]
            return eager, self.verified
        section.rounded = sorted(rounded)
        self.report.notes += quantization_notes(section)
        found = [one for file in files for one in file.quantized_weights]
        tie, tensors = tied_head(eager.models[0], self.graphs.tensors), self.graphs.tensors
        folder = stack.enter_context(dequantized_reference(eager.folder, tensors, found, tie, self.options.smoothing))
        fixed = self.verified.entries[0].fixed_inputs
        dequantized = Eager(folder, eager.dtype, code=self.options.code, fixed_inputs=fixed)
        verified = replace(verified, settings=replace(verified.settings, float_activations=True))
        yield from self._comparison(verified, dequantized, is_half=is_half)
        return dequantized, verified

    def _comparison(self, verified: VerifiedFolder, dequantized: Eager, *, is_half: bool) -> Checks:
        graphs = yield from open_graphs(open_graph, verified.path, verified.entries, verified.settings)
        comparison = FolderComparison(
            dequantized,
            verified.path,
            verified.models,
            verified.settings,
            self.session.selection,
            self.report,
            open_graph,
            varied=not is_half,
            scaler=scaler_of(verified, self.graphs),
            start=self._start,
        )
        yield from comparison.checks(graphs)

    def _start(self, folder: Path, prefix: PrefixEntry) -> Start:
        """The prefix by the model before it was quantized, from which an export computes it."""
        start = trained_start(folder, prefix)
        runners = [one for one in self.eager.runners if isinstance(one, EagerRunner)]

        def of(runner: EagerRunner) -> PrefixStart:
            return start(next(one for one in runners if one.model.dtype == runner.model.dtype))

        return of


def _without_rounding(folder: Path, rounded: set[str], options: QuantizationOptions, model: onnx.ModelProto) -> None:
    """Removes the rounding of activations in place, and adds the operators that did it."""
    constants = Constants(model, folder)
    rounded.update(remove_rounding(model, constants, options.removable(model, constants)))


def audited_files(verified: VerifiedFolder) -> list[GraphFile]:
    """A file for each graph of the folder, and one for its embedding table; `path` is that of the first stage."""
    entries = {entry.name: entry for entry in verified.entries}
    firsts = {name: entries[name].files[0] if name in entries else name for name in verified.models}
    return [_file(verified.path / firsts[name], name, model) for name, model in verified.models.items()]


def _file(path: Path, name: str, model: onnx.ModelProto) -> GraphFile:
    """The binding is incomplete: entries run as `OrtGraph`, which needs none."""
    past = {MAP.cache_name(MAP.past, port): port for port in input_names(model)}
    present = {MAP.cache_name(MAP.present, port.name): port.name for port in model.graph.output}
    past.pop("", None)
    present.pop("", None)
    others = frozenset(input_names(model)) - set(past.values())
    return GraphFile(path, name, model, Binding(MAP, others, past, present))


def scaler_of(verified: VerifiedFolder, graphs: ExternalGraphs) -> Scaler:
    """Opens graphs on scaled weights: scales of codes, and weights of floats."""
    found = {file.name: file for file in graphs.files}
    stages = {name: found[entry.name] for entry in verified.entries for name in entry.files}
    decoders = [found[entry.name] for entry in verified.entries]
    reasons = [why_not_scalable(file.contents, file.quantized_weights, graphs.tensors) for file in decoders]

    def scaled(settings: SessionSettings, scaling: WeightScaling) -> SessionSettings:
        def change(path: Path, model: onnx.ModelProto) -> None:
            if settings.change:
                settings.change(path, model)
            file = stages.get(path.name) or found[path.name]
            scale = scaled_settings(settings, file, graphs.tensors, scaling).change
            assert scale
            scale(path, model)

        return replace(settings, change=change)

    return Scaler(next(filter(None, reasons), ""), scaled)


def shipped_runner(verified: VerifiedFolder) -> tuple[str, OrtRunner]:
    """Name and runner of the graphs as shipped, with logits; MalformedInput if onnxruntime cannot open one."""
    verified = with_logits(verified)
    graphs = [open_graph(verified.path, entry, verified.settings) for entry in _pair(verified)]
    return "+".join(graph.name for graph in graphs), OrtRunner(graphs[0], graphs[-1])


def _pair(verified: VerifiedFolder) -> list[GraphEntry]:
    roles = {entry.role: entry for entry in verified.entries}
    pair = [roles[role] for role in ("prefill", "decode") if role in roles]
    return pair if len(pair) > 1 else [verified.entries[-1]]


def plainly_rounded_runner(
    verified: VerifiedFolder, graphs: ExternalGraphs, smoothing: StoredSmoothing, stack: ExitStack
) -> OrtRunner | None:
    """The graph of prompts with plainly rounded codes, a copy on `stack`; None if all its codes are such already."""
    entry = _pair(verified)[0]
    file = next(file for file in graphs.files if file.name == entry.name)
    rounded = plainly_rounded(file.path, file.model, file.quantized_weights, graphs.tensors, smoothing)
    if (copy := stack.enter_context(rounded)) is None:
        return None
    for path in [*entry.paths(verified.path), verified.path / EMBEDDINGS]:
        if path.is_file() and not (copy.parent / path.name).exists():
            shutil.copyfile(path, copy.parent / path.name)
    return shipped_runner(replace(verified, path=copy.parent, entries=[entry]))[1]


CHOSEN = {"tokens", "scores"}
INNER, LOGITS = "postprocess/logits", "logits"
"""Names of the logits before the choice, in these graphs and in those without `--postprocess`."""


def restore_logits(model: onnx.ModelProto) -> None:
    """Returns the logits in place of tokens and scores, in place; other graphs stay as they are."""
    made = {name for node in model.graph.node for name in node.output}
    if INNER not in made or LOGITS in made:
        return
    model.graph.node.append(onnx.helper.make_node("Identity", [INNER], [LOGITS], name=f"{INNER}/restored"))
    kept = [port for port in model.graph.output if port.name not in CHOSEN]
    del model.graph.output[:]
    model.graph.output.extend([onnx.ValueInfoProto(name=LOGITS), *kept])


def with_logits(verified: VerifiedFolder) -> VerifiedFolder:
    """The folder with graphs that are changed in memory; the same one if all of them return logits."""
    if not any(entry.postprocess for entry in verified.entries):
        return verified
    entries: list[GraphEntry] = [replace(entry, postprocess="") for entry in verified.entries]
    return replace(verified.changed(restore_logits, verified.named), entries=entries)
