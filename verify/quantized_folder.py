"""Compares quantized graphs of a folder with a model of the same codes, and their codes with the model's weights."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import onnx

from llmconv.causal_lm import context_length, mtp_tensors
from llmconv.checkpoint import read_json
from llmconv.errors import UnsupportedInput
from llmconv.files.safetensors_file import FileTensor, read_header
from llmconv.output.manifest import MANIFEST, PrefixEntry, read_manifest
from llmconv.quantized_weights.quantized_checkpoint import FIELD
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.low_memory.pieced_graph import PiecedRunner
from llmconv.runtime.low_memory.runner import EmptyRunner, StreamedRunner
from llmconv.runtime.onnxruntime.graph import open_graph
from llmconv.runtime.onnxruntime.guard import attributes, external_fields, nodes
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.runner import Runner
from llmconv.tensors import LazyTensor
from llmconv.verify.audit.decisions import audit_foreign_decisions, read_config
from llmconv.verify.audit.weights import NAME as GRAPH_FILE
from llmconv.verify.audit.weights import WeightSource
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.layer_by_layer import Scaler, open_in_pieces, why_not_layered
from llmconv.verify.comparison.run import distinct_entries, open_graphs, with_copies
from llmconv.verify.float_folder import (
    STRUCTURE,
    Compared,
    Method,
    Plan,
    holds_one_layer,
    in_float32_steps,
    opened_checks,
    planned,
    rounds_every_value,
    structure_checks,
    with_cuts,
    with_logits,
)
from llmconv.verify.layers.graph_index import NUMBERED
from llmconv.verify.layers.induction import Induction, join_parts
from llmconv.verify.layers.layer_checks import PART_BYTES
from llmconv.verify.other_exporters.comparison import scaled_settings, why_not_scalable
from llmconv.verify.other_exporters.external_graph import GraphFile, ModelSizes
from llmconv.verify.other_exporters.port_map import LLMCONV, Binding, input_names
from llmconv.verify.other_exporters.quantized.accuracy import check_ranges, measured_extremes
from llmconv.verify.other_exporters.quantized.audit import INT8, LEVEL
from llmconv.verify.other_exporters.quantized.dequantized_reference import (
    FILES,
    QuantizedWeights,
    StoredSmoothing,
    plain_model,
    remove_rounding,
    tied_head,
    unstacked,
)
from llmconv.verify.other_exporters.quantized.quantized_matrix import (
    CODES,
    JOINED,
    Constants,
    QuantizedMatrix,
    name_in_file,
)
from llmconv.verify.other_exporters.quantized.schemes import quantized_matrices, quantized_operators
from llmconv.verify.other_exporters.quantized.tensor_matching import named_tensors
from llmconv.verify.other_exporters.quantized_verdict import (
    QuantizationOptions,
    measure_cost,
    quantization_notes,
    rounded_runner,
)
from llmconv.verify.other_exporters.replay import ExternalGraphs
from llmconv.verify.other_exporters.run import as_in_graphs, audit_graph_weights, half_of
from llmconv.verify.reference.cost_estimate import CostEstimate, choose
from llmconv.verify.reference.eager import ComputedModel, Eager, PrefixedRunner, PrefixStart, Start, trained_start
from llmconv.verify.reference.other_roundings import WeightScaling
from llmconv.verify.results import Check, Checks, Report, audited
from llmconv.verify.scenarios.calls import ModelFacts
from llmconv.verify.verification import Checking, Session

COST_WORK = 5e11
"""Products of an element and a token, for each model of which the cost of a large model is measured."""
LEAST_TOKENS = 32
ROUNDED_AGAIN = 2_000_000_000  # weights of a model up to which its cost is compared with that of plain rounding
LARGE, EVERY = 500_000_000, 8
"""Weights of a model with more of which the search for scales is repeated for one row in eight only."""
UNSEARCHED = f"scales of {EVERY - 1} rows in {EVERY} that a search tries, and that are not those of the least error"
WHOLE_BYTES = {
    getattr(onnx.TensorProto, name.upper()): name for name in ("int8", "uint8", "float16", "bfloat16", "int32", "int64")
} | {onnx.TensorProto.FLOAT: "float32"}
"""Names of element types as in files, by number; codes of less than a byte are bytes there."""


def is_quantized(models: Mapping[str, onnx.ModelProto]) -> bool:
    return any(map(quantized_operators, models.values()))


@dataclass(frozen=True)
class QuantizedFolder:
    """A folder of graphs with quantized weights, prefill and decode together."""

    verified: VerifiedFolder
    reference: Path  # the model before it was quantized, or the quantized model whose codes the graphs have
    report: Report
    session: Session
    options: QuantizationOptions

    def checks(self, method: Method, eager: Eager | None, low_memory: bool | None) -> Checking:
        """All checks; an open reference `eager` is used where the whole model runs.

        `low_memory` holds one layer at a time; None to decide by free memory, False to use any.
        """
        verified = self.verified
        yield [*self._unrecorded(), *self._other_levels()]
        entries, copies = distinct_entries(verified.path, verified.entries)
        self.report.copies = {name: first for first, names in copies.items() for name in names}
        models = {name: model for name, model in verified.models.items() if name not in self.report.copies}
        once = replace(self, verified=replace(verified, entries=entries, models=models))
        with ExitStack() as stack:
            return (yield from with_copies(once._of_distinct(method, eager, low_memory, stack), copies))

    def _of_distinct(self, method: Method, known: Eager | None, low_memory: bool | None, stack: ExitStack) -> Checking:
        """All checks of graphs of which no two are the same bytes."""
        verified, report, options = self.verified, self.report, self.options
        model = plain_model(self.reference, stack)
        heads = {*mtp_tensors(model.tensors, read_json(self.reference / "config.json"))}  # `MtpFolder` has their graph
        tensors = unstacked({name: tensor for name, tensor in model.tensors.items() if name not in heads})
        every = EVERY if sum(prod(tensor.shape) for tensor in tensors.values()) > LARGE else 1
        options = replace(options, codes=replace(options.codes, kept=model.kept, every=every))
        if wrong := options.smoothing.check(verified.entries[0].name, tensors):
            yield wrong
            return known, verified
        tensors = options.smoothing.applied(tensors)
        graphs = ExternalGraphs(audited_files(verified), ModelSizes({}), verified.settings, tensors)
        copies = _Copies.of(verified, options)
        verified, cut = copies.shipped, copies.cut
        source = WeightSource(verified.path, {}, tensors, in_place=False)
        session, code = self.session, options.code
        plan = planned(method, cut, model, source, session, low_memory, code, quantized=True)
        report.method = plan.method
        report.notes += [plan.note] if plan.note else []
        for name, graph in self.verified.models.items():
            yield misplaced_codes(name, graph, verified.path)
        if plan.method == STRUCTURE:
            alone, audits = not any(map(_mixes_bits, self.verified.models.values())), self._named(graphs)
            settings = self.session.settings
            yield from structure_checks(self.verified, settings, report, plan.induction, audits, alone=alone)
            return None, verified
        config = read_json(self.reference / "config.json")
        yield from audit_graph_weights(graphs.files, tensors, config, report, options.codes)
        report.unseen += [UNSEARCHED] if every > 1 and options.preset and not options.codes.plain else []
        yield from self._decisions()
        half = half_of(graphs.files)
        shipped = as_in_graphs(model, graphs.files, tensors)
        quantized = QuantizedModel(verified, graphs, shipped, report, session, options, stack)
        layered = self._is_layered(plan, known, low_memory, model)
        eager = None
        if not layered and not plan.induction:
            eager = known if known and shipped.weights is None else quantized.eager()
            eager = (eager.in_dtype(half) if half else eager).with_defaults()
        pieces = layered and not (plan.induction and why_not_layered(verified.entries, verified.models))
        if not (yield from quantized.opens(pieces=pieces)):
            return eager, verified
        yield from quantized.cost(eager, pieces=pieces)
        yield quantized.ranges(eager)
        if copies.why_rounded:
            yield [Check("structure", graphs.files[0].name, "", verdict="skip", detail=copies.why_rounded)]
            return eager, verified
        run = cut if plan.induction else copies.unrounded
        compared = quantized.compared(run, copies.rounded, eager, layered=layered, induction=plan.induction)
        return (yield from compared.in_order((), compared.run(None, quantized.dtype, is_half=bool(half)), opens=False))

    def _is_layered(self, plan: Plan, known: Eager | None, low_memory: bool | None, model: ComputedModel) -> bool:
        """Whether one layer is held at a time."""
        if plan.induction:
            return holds_one_layer(self.verified, model) if low_memory is None else low_memory
        if known:
            return bool(low_memory)
        estimate = CostEstimate.of_quantized(model.tensors, len(self.verified.entries))
        layered, note = choose(estimate, low_memory, why_not_layered(self.verified.entries, self.verified.models))
        self.report.notes += [note] if note else []
        return layered

    def _named(self, graphs: ExternalGraphs) -> Checks:
        """Audits without numbers: which tensors the codes are named after, and decisions."""
        yield [named_codes(file, graphs.tensors) for file in graphs.files]
        yield from self._decisions()

    def _decisions(self) -> Checks:
        config = read_config(self.reference)
        for name, model in self.verified.models.items():
            checks, notes = audit_foreign_decisions(name, model, config)
            yield checks
            self.report.notes += notes

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


def _mixes_bits(model: onnx.ModelProto) -> bool:
    """Whether products of layers have different numbers of bits, as of `int4-mixed`: such layers are not alike."""
    products = [node for node in nodes(model) if node.op_type == "MatMulNBits" and NUMBERED.match(node.input[1])]
    return len({attributes(node).get("bits", 4) for node in products}) > 1


def misplaced_codes(graph: str, model: onnx.ModelProto, folder: Path) -> list[Check]:
    """A failed check of a graph with initializers that map other bytes of a file of codes than those of their names.

    A joined product maps several tensors, `X.codes+Y.codes`, one behind the other.
    """
    files = {path.name: read_header(path).tensors for path in folder.glob(FILES)}
    wrong = []
    for tensor in model.graph.initializer:
        fields = external_fields(tensor)
        known, parts = files.get(fields.get("location", "")), name_in_file(tensor.name).split(JOINED)
        if known is None:
            if any(PART.sub("", parts[0]) in found for found in files.values()):
                wrong.append(f"`{tensor.name[:200]}` does not map the file that has its name")
            continue
        first, at = int(fields.get("offset", 0)), int(fields.get("offset", 0))
        places = [_place(part, known) for part in parts]
        for start, end in places:
            at = end if start == at else -1
        if at != first + int(fields.get("length", 0)):
            wrong.append(f"`{tensor.name[:200]}` maps other bytes than those of its name")
            continue
        kind = known[PART.sub("", parts[0])].dtype.name
        if tensor.data_type in WHOLE_BYTES and kind != WHOLE_BYTES[tensor.data_type]:
            wrong.append(f"`{tensor.name[:200]}` is {kind} in the file")
    return [audited("weights", graph, wrong)] if wrong else []


PART = re.compile(r"\[(\d+)(?::(\d+))?\]$")  # of the first axis: `X.codes[3]` of one expert, `X.codes[0:64]`


def _place(name: str, known: Mapping[str, FileTensor]) -> tuple[int, int]:
    """Where the bytes of a tensor of a file, or of a part of one, begin and end; (-2, -2) for an unknown name."""
    found, tensor = PART.search(name), known.get(PART.sub("", name))
    if tensor is None:
        return -2, -2
    first, last = (int(found[1]), int(found[2] or int(found[1]) + 1)) if found else (0, tensor.num_rows)
    row = tensor.nbytes // max(tensor.num_rows, 1)
    return (tensor.offset + first * row, tensor.offset + last * row) if last <= tensor.num_rows else (-2, -2)


def named_codes(file: GraphFile, tensors: Mapping[str, LazyTensor]) -> Check:
    """Whether all quantized matrices of a graph have the shapes of the tensors that they are named after."""
    try:
        stored = quantized_matrices(file.model, Constants(file.model, file.path.parent))
    except UnsupportedInput as error:
        return Check("weights", file.name, "", verdict="skip", detail=error.message)
    sizes = [sum(prod(tensors[name].shape) for name in named_tensors(one, tensors)) for one in stored]
    wrong = [one for one, size in zip(stored, sizes, strict=True) if size != prod(one.shape) or not _has_own(one)]
    problem = "is not named after tensors of its size, or has scales of others"
    problems = [f"`{one.name[:200]}` {problem}" for one in wrong]
    passed = f"{len(stored)} quantized matrices are named after the model's tensors, and have their sizes"
    found = audited("weights", file.name, problems, passed)
    return found if stored else replace(found, verdict="skip")


def _has_own(stored: QuantizedMatrix) -> bool:
    """Whether codes that llmconv wrote have the scales of the same tensor."""
    codes = name_in_file(stored.name)
    return not PART.sub("", codes).endswith(CODES) or name_in_file(stored.scales) == codes.replace(CODES, ".scales")


@dataclass(frozen=True)
class QuantizedModel:
    """Audited graphs (`graphs`, with the model's tensors), and the model before it was quantized (`model`)."""

    verified: VerifiedFolder
    graphs: ExternalGraphs
    model: ComputedModel
    report: Report
    session: Session
    options: QuantizationOptions
    stack: ExitStack

    @property
    def settings(self) -> SessionSettings:
        """Those of sessions: some kernels support only prepacked quantized weights."""
        return replace(self.verified.settings, prepack=True)

    @property
    def dtype(self) -> str:
        return half_of(self.graphs.files) or self.graphs.files[0].dtype

    def eager(self) -> Eager:
        return Eager(self.model.folder, self.dtype, code=self.options.code, weights=self.model.weights)

    @cached_property
    def weights(self) -> QuantizedWeights:
        weights = [one for file in self.graphs.files for one in file.quantized_weights]
        empty = EmptyRunner(self.model.folder, **self.model.options(self.options.code))
        tensors = self.graphs.tensors
        tie = tied_head(empty.model, tensors)
        return QuantizedWeights(self.model.folder, tensors, weights, tie, self.options.smoothing, self.stack)

    def opens(self, *, pieces: bool) -> Generator[list[Check], None, bool]:
        """Whether onnxruntime opens the graphs, without weights and unless `pieces` with them; failed checks if not."""
        verified = self.verified
        yield (refused := opened_checks(verified, self.settings))
        if pieces or refused:
            return not refused
        opened = yield from open_graphs(open_graph, verified.path, verified.entries, self.settings)
        return len(opened) == len(verified.entries)

    def cost(self, eager: Eager | None, *, pieces: bool) -> Checks:
        """The loss of accuracy; without an open model on fewer tokens, layer by layer.

        `pieces`: the graph runs in pieces.
        """
        verified, suite = self.verified, self.session.selection.suite
        prefix = next((entry.prefix for entry in verified.entries if entry.prefix), None)
        if any(entry.postprocess for entry in verified.entries):
            self.report.notes.append("the cost is that of the logits from which the graphs choose tokens")
        shipped = shipped_runner(replace(verified, settings=self.settings), steps=False, pieces=pieces)
        start = trained_start(verified.path, prefix) if prefix else None

        elements = sum(prod(tensor.shape) for tensor in self.model.tensors.values())

        def plain() -> Runner | None:
            if eager is None and elements > ROUNDED_AGAIN:
                self.report.unseen.append("a cost of quantization above that of plain rounding")
                return None
            found = rounded_runner(self.weights, self.options.code, whole=prefix is not None)
            return PrefixedRunner(found, start(found), prefix.first_position) if found and prefix and start else found

        model: Runner
        if eager is None:
            model = StreamedRunner(self.model.folder, **self.model.options(self.options.code))
            most = max(LEAST_TOKENS, int(COST_WORK / elements))
            if isinstance(shipped[1], PiecedRunner) and shipped[1].last_logits:
                most = LEAST_TOKENS  # a call for each token, whose caches are held
            facts = ModelFacts(model.vocab_size, max_positions=context_length(self.model.folder))
        else:
            measured, most = eager.with_prefix(prefix, start) if prefix and start else eager, 1 << 30
            model, facts = measured.runners[0], measured.facts()
        facts = replace(
            facts, max_positions=min(filter(None, (facts.max_positions, shipped[1].cache_capacity)), default=None)
        )
        yield from measure_cost(shipped, plain, model, self.model.folder, facts, self.options, self.report, suite, most)

    def ranges(self, eager: Eager | None) -> list[Check]:
        """A check of the ranges of activations in each graph, if they were measured on a text."""
        text, code = self.options.ranges, self.options.code
        if text is None:
            return []
        folder, tensors = self.model.folder, self.graphs.tensors
        given = text.tokens(folder, context_length(folder), trust_remote_code=code is not None)
        runner = eager.eager_runners[1] if eager else StreamedRunner(folder, **self.model.options(code))
        known = measured_extremes(runner.model, runner, tensors, given), self.options.smoothing.factors
        return [
            check_ranges(file.name, file.model, Constants(file.model, file.path.parent), file.quantized_weights, *known)
            for file in self.graphs.files
        ]

    def compared(
        self,
        unrounded: VerifiedFolder,
        operators: list[str],
        eager: Eager | None,
        *,
        layered: bool,
        induction: Induction | None,
    ) -> Compared:
        """The graphs without rounding of activations, and the model with the values of the codes."""
        section = self.report.quantization
        assert section is not None
        section.rounded = operators
        self.report.notes += quantization_notes(section)
        settings = replace(unrounded.settings, float_activations=True, prepack=True)
        return Compared(
            replace(unrounded, settings=settings),
            self.weights.dequantized(),
            self.report,
            self.session.selection,
            self.options.code,
            layered=layered,
            induction=induction,
            scaler=scaler_of(self.verified, self.graphs),
            start=partial(self._start, eager),
        )

    def _start(self, eager: Eager | None, folder: Path, prefix: PrefixEntry) -> Start:
        """The prefix by the model before it was quantized, from which an export computes it."""
        assert eager is not None
        start = trained_start(folder, prefix)
        runners = [one for one in eager.runners if isinstance(one, EagerRunner)]

        def of(runner: EagerRunner) -> PrefixStart:
            return start(next(one for one in runners if one.model.dtype == runner.model.dtype))

        return of


@dataclass(frozen=True)
class _Copies:
    """The folder with graphs that are changed in memory."""

    shipped: VerifiedFolder  # computes what the files do
    unrounded: VerifiedFolder  # the same without the rounding of activations
    cut: VerifiedFolder  # as `unrounded`, with one value at every cut between layers
    rounded: list[str]  # operators whose rounding was removed
    why_rounded: str  # why the rounding could not be removed; empty if it was

    @classmethod
    def of(cls, verified: VerifiedFolder, options: QuantizationOptions) -> _Copies:
        whole = verified.joined(join_parts)
        folders = [verified] if whole is verified else [verified, whole]
        if rounds_every_value(verified):
            folders = [one.changed(in_float32_steps, "") for one in folders]
        shipped, rounded, why = folders[0], set[str](), ""

        def without_rounding(model: onnx.ModelProto) -> None:
            constants = Constants(model, verified.path)
            rounded.update(remove_rounding(model, constants, options.removable(model, constants)))

        try:
            folders = [one.changed(without_rounding, "") for one in folders]
        except UnsupportedInput as error:
            why = error.message
        return cls(shipped, folders[0], with_cuts(folders[-1]), sorted(rounded), why)


@dataclass(frozen=True)
class CodedGraphs:
    """Audited quantized graphs that run no scenarios: without a cache, or of an MTP head."""

    unrounded: VerifiedFolder  # they without the rounding of activations
    files: Sequence[GraphFile]
    plain: ComputedModel  # the model with plain weights
    tensors: Mapping[str, LazyTensor]  # those, as the codes are made of them
    smoothing: StoredSmoothing
    stack: ExitStack

    def model_of(self, files: Sequence[GraphFile], model: Any) -> ComputedModel:
        """The model with the values of the codes of some files; `model` of its class says whether the head is tied."""
        found, tie = [one for file in files for one in file.quantized_weights], tied_head(model, self.tensors)
        weights = QuantizedWeights(self.plain.folder, self.tensors, found, tie, self.smoothing, self.stack)
        return weights.dequantized()


def audited_codes(
    verified: VerifiedFolder,
    reference: Path,
    further: Mapping[str, LazyTensor],
    options: QuantizationOptions,
    report: Report,
    stack: ExitStack,
) -> Generator[list[Check], None, CodedGraphs | None]:
    """Audits quantized graphs that run no scenarios; None if they cannot be compared, which a check says.

    `further` are weights that the reference has outside of its model; `stack` keeps configurations.
    """
    plain = plain_model(reference, stack)
    tensors = unstacked({**plain.tensors, **further})
    options = replace(options, codes=replace(options.codes, kept=plain.kept))
    if wrong := options.smoothing.check(verified.entries[0].name, tensors):
        yield wrong
        return None
    tensors = options.smoothing.applied(tensors)
    for name, graph in verified.models.items():
        yield misplaced_codes(name, graph, verified.path)
    config, files = read_config(reference), audited_files(verified)
    yield from audit_graph_weights(files, tensors, config, report, options.codes)
    for name, graph in verified.models.items():
        checks, notes = audit_foreign_decisions(name, graph, config)
        report.notes += notes
        yield checks
    copies = _Copies.of(verified, options)
    if copies.why_rounded:
        yield [Check("structure", files[0].name, "", verdict="skip", detail=copies.why_rounded)]
        return None
    settings = replace(copies.unrounded.settings, float_activations=True, prepack=True)
    unrounded = replace(copies.unrounded, settings=settings)
    return CodedGraphs(unrounded, files, plain, tensors, options.smoothing, stack)


def audited_files(verified: VerifiedFolder) -> list[GraphFile]:
    """A file for each graph of the folder, and one for its embedding table; `path` is that of the first stage."""
    entries = {entry.name: entry for entry in verified.entries}
    firsts = {name: entries[name].files[0] if name in entries else name for name in verified.models}
    found = []
    for name, model in verified.models.items():
        outputs = [port.name for port in model.graph.output]
        binding = Binding.of(LLMCONV, input_names(model), outputs)  # incomplete: entries run as `OrtGraph` without it
        found.append(GraphFile(verified.path / firsts[name], name, model, binding))
    return found


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


def shipped_runner(verified: VerifiedFolder, *, steps: bool = True, pieces: bool = False) -> tuple[str, OrtRunner]:
    """Name and runner of the graphs as shipped, with logits; MalformedInput if onnxruntime cannot open one.

    Without `steps` the decode graph, whose packed codes are held a second time, is opened only if the logits of whole
    prompts need it. `pieces`: one graph that runs in pieces, of which one is open at a time.
    """
    verified = with_logits(verified)
    roles = {entry.role: entry for entry in verified.entries}
    pair = [roles[role] for role in ("prefill", "decode") if role in roles]
    entries = pair if len(pair) > 1 else [verified.entries[-1]]
    if not steps and not entries[0].last_logits:
        entries = entries[:1]
    if pieces:
        graph = open_in_pieces(verified.path, entries[0], verified.settings, PART_BYTES)
        return graph.name, PiecedRunner(graph)
    graphs = [open_graph(verified.path, entry, verified.settings) for entry in entries]
    return "+".join(graph.name for graph in graphs), OrtRunner(graphs[0], graphs[-1])
