"""Verifies a folder whose graphs have weights of floats: audits, then the scenarios by one of the methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from llmconv.causal_lm import mtp_tensors
from llmconv.checkpoint import has_weights, open_weights, read_json
from llmconv.errors import UsageProblem, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.output.manifest import GraphEntry, mtp_entry
from llmconv.runtime.extra_inputs import INPUTS_EMBEDS, is_past
from llmconv.runtime.onnxruntime.graph import open_graph
from llmconv.runtime.onnxruntime.guard import is_external, load_guarded, refill
from llmconv.runtime.onnxruntime.session_settings import (
    CPU,
    HALF_PRECISION,
    SessionSettings,
    half_precision,
    provider_name,
)
from llmconv.runtime.onnxruntime.time_limit import LimitedSession, TimeLimit
from llmconv.verify.audit.decisions import audit_decisions, read_config
from llmconv.verify.audit.weights import (
    WeightSource,
    audit_files,
    audit_graph_files,
    audit_ranges,
    audit_weights,
    odd_weights,
)
from llmconv.verify.bisect.replay import JoinedStages, VerifiedFolder
from llmconv.verify.comparison.half_precision import (
    IN_FLOAT32,
    ROUNDED,
    WITHOUT_KERNELS,
    KnownConstants,
    round_every_value,
    widen,
)
from llmconv.verify.comparison.layer_by_layer import Scaler, StreamedEager, fixed_sizes, open_in_pieces, why_not_layered
from llmconv.verify.comparison.run import FolderComparison, GraphOpener, open_graphs, takes_embeddings
from llmconv.verify.layers.graph_index import NotLayered
from llmconv.verify.layers.graph_layers import SUMMING, GraphLayers, add_before_norms, described
from llmconv.verify.layers.induction import Induction, LayerChoice, join_parts
from llmconv.verify.layers.layer_checks import PART_BYTES, Drift, SingleLayerChecks, statements, too_small, unseen_of
from llmconv.verify.reference.cost_estimate import CostEstimate, choose, distinct_files
from llmconv.verify.reference.eager import ComputedModel, Eager, StartOf, trained_start
from llmconv.verify.reference.other_roundings import SCALED_SCENARIOS
from llmconv.verify.results import WHOLE, Check, Checks, Report
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.verification import Checking, Session

WITHOUT_NUMBERS = ("wrong numbers (`--method induction` compares them)", "weights that were changed since the export")


@dataclass(frozen=True)
class FloatFolder:
    """A folder of graphs with weights of floats, and how it is verified."""

    verified: VerifiedFolder
    reference: Path
    report: Report
    session: Session
    code: Path | None  # the reference's folder where its own code is trusted
    allow_changed: bool  # a graph that was changed after its export is a note instead of a failure

    def checks(self, method: Method, eager: Eager | None, low_memory: bool | None) -> Checking:
        """All checks; an open reference `eager` is used where the whole model runs.

        `low_memory` holds one layer at a time; None to decide by free memory.
        """
        verified, report = self.verified, self.report
        source = WeightSource.of(verified.path, self.reference)
        cut = with_cuts(verified.joined(join_parts))
        model = ComputedModel(self.reference)
        plan = planned(method, cut, model, source, self.session, low_memory, self.code)
        report.method = plan.method
        report.notes += [plan.note] if plan.note else []
        if plan.method == STRUCTURE:
            audits = self._audits(lambda name: False)
            yield from structure_checks(verified, self.session.settings, report, plan.induction, audits)
            return eager, verified
        if induction := plan.induction:
            layered = holds_one_layer(self.verified, model) if low_memory is None else low_memory
            audits = self._audits(None if induction.runs_all else induction.runs_weight)
            eager = None
        else:
            layered, audits = bool(low_memory) if eager else self._is_layered(low_memory), self._audits()
        options = self.report, self.session.selection, self.code
        compared = Compared(cut if induction else verified, model, *options, layered=layered, induction=induction)
        if half := half_precision(next(iter(verified.models.values()))):
            rounded = compared if eager else replace(compared, reference=ComputedModel(self.rounded_model()))
            comparing = compare_half_precision(rounded, half, eager)
        else:
            comparing = compared.run(eager)
        return (yield from compared.in_order(audits, comparing))

    def recorded_files(self, *, hashes: bool = True) -> Checks:
        """Checks of the recorded files, of weights if `hashes`."""
        verified, report = self.verified, self.report
        files = verified.path, verified.entries, verified.models
        checks, notes = audit_graph_files(*files, allow_changed=self.allow_changed)
        yield checks
        report.notes += notes
        report.unseen += ["graphs that are not the folder's own"] if any(c.verdict == "skip" for c in checks) else []
        if hashes:
            yield audit_files(verified.path)

    def _audits(self, reads: Callable[[str], bool] | None = None) -> Checks:
        """The recorded files, every initializer, and the decisions in the graphs.

        `reads` is whether the values of a tensor of the model are looked at; None for all, whose files are hashed, too.
        """
        verified, report = self.verified, self.report
        yield from self.recorded_files(hashes=reads is None)
        prefixes = [entry.prefix.file for entry in verified.entries if entry.prefix]
        source = WeightSource.of(verified.path, self.reference, prefixes)
        report.notes += odd_weights({n: one for n, one in source.reference.items() if reads is None or reads(n)})
        yield audit_ranges(self.reference)
        used, config = set[str](), read_config(self.reference)
        for name, model in verified.models.items():
            check, names = audit_weights(name, model, source)
            used |= names
            yield [check]
        yield [audit_decisions(name, model, config) for name, model in verified.models.items()]
        if mtp_entry(verified.path):  # `verify.mtp` compares these
            used |= set(mtp_tensors(source.reference, config["stated"]))
        unused = sorted(set(source.reference) - used)
        if used and unused:
            report.notes.append(f"{len(unused)} tensors of the model are in no graph, first `{unused[0]}`")

    def rounded_model(self) -> Path:
        """The model with weights rounded like those of the graphs.

        That is the folder of the graphs if it holds a model: the audit has compared its weights with the reference's.
        """
        own = self.verified.path
        holds_one = (own / "config.json").is_file() and has_weights(own)
        return own if holds_one else self.reference

    def _is_layered(self, wanted: bool | None) -> bool:
        """Whether to go layer by layer because the whole model does not fit; a note in the report states it."""
        session, entries = self.session, self.verified.entries
        paths: Sequence[Path] = [path for entry in entries for path in entry.paths(self.verified.path)]
        why_not = why_not_layered(entries, self.verified.models)
        if provider_name(session.settings.provider) != CPU:
            why_not = "`--provider` holds the whole model"
            if wanted:
                raise UsageProblem("`--low-memory` runs on the CPU", hint="leave out `--low-memory` or `--provider`")
        if session.bisect or session.minimized or session.selection.repeat > 1:
            why_not = "`--repeat`, `--bisect` and `--minimize` hold the whole model"
        layered, note = choose(CostEstimate.of(open_weights(self.reference), distinct_files(paths)), wanted, why_not)
        self.report.notes += [note] if note else []
        return layered


@dataclass(frozen=True)
class Compared:
    """A folder that is compared with its model."""

    verified: VerifiedFolder
    reference: ComputedModel
    report: Report
    selection: Selection
    code: Path | None  # the reference's folder where its own code is trusted
    layered: bool  # run layer by layer
    # the classes of layers, of which one each runs the scenarios; None to run all layers
    induction: Induction | None = None
    drift: Drift = field(default_factory=lambda: Drift([], []))  # receives the errors of single layers
    scaler: Scaler | None = None  # as for `FolderComparison`, like the next
    start: StartOf = trained_start

    @property
    def on_cpu(self) -> bool:
        return provider_name(self.verified.settings.provider) == CPU

    def eager(self, dtype: str, known: Eager | None) -> Eager:
        """The reference with the noise of a dtype; `known` is an open reference of the model."""
        skipped = self.induction.left_out(self.induction.kept) if self.induction else frozenset()
        fixed = self.verified.entries[0].fixed_inputs
        options: dict[str, Any] = {"code": self.code, "skipped": skipped, "fixed_inputs": fixed}
        options["weights"], folder = self.reference.weights, self.reference.folder
        if self.layered:
            return StreamedEager(folder, dtype, selection=self.selection, **options)
        return known.in_dtype(dtype).with_fixed(fixed) if known else Eager(folder, dtype, **options)

    def in_order(self, audits: Iterable[list[Check]], compared: Checking, *, opens: bool = True) -> Checking:
        """The audits and the scenarios; of an induction, the structure before and the statements after them.

        `opens`: onnxruntime has yet to open the graphs.
        """
        induction, report = self.induction, self.report
        if induction:
            report.odd_layers = induction.odd_layers()
            report.notes += [f"{text}; it is a class of its own" for text in report.odd_layers.values()]
            yield induction.checks(alone=False)
            yield opened_checks(self.verified, self.verified.settings) if opens else []
        yield from audits
        found = yield from compared
        if induction:
            report.unseen += unseen_of(induction)
            report.statements = statements(induction, report, self.drift)
        return found

    def run(self, known: Eager | None, dtype: str = "", *, is_half: bool = False) -> Checking:
        """Opens the graphs and runs the scenarios.

        `known`: an open reference of the model, if any. `dtype`: of the noise (default: that of the graphs). `is_half`:
        the graphs round to half precision: original weights and settings only, calmest rows if routed.
        """
        verified, opener = self.verified, self._opener()
        if self.induction:
            verified = self.induction.shortened(verified)
        graphs = yield from open_graphs(opener, verified.path, verified.entries, verified.settings)
        if not graphs:
            return known, verified
        eager = self.eager(dtype or graphs[0].dtype.name, known)
        files = verified.path, verified.models, verified.settings
        kinds = verified.named, not is_half, is_half and any(map(routes, verified.models.values()))
        run = FolderComparison(eager, *files, self.selection, self.report, opener, *kinds)
        comparison = replace(run, scaler=self.scaler, start=self.start)
        yield from comparison.checks(graphs)
        if self.induction:
            eager.release()
            whole = self.verified
            settings = replace(whole.settings, change=None)  # the models are changed already
            graphs_of = whole.path, with_logits(whole).models, self.reference
            single = SingleLayerChecks(
                self.induction, *graphs_of, eager.dtype, settings, self.code, whole.named, self.drift
            )
            yield from single.checks()
        return eager, verified

    def _opener(self) -> GraphOpener:
        """Opens graphs whole, or in pieces: smaller ones if few layers run."""
        if not self.layered or (self.induction and why_not_layered(self.verified.entries, self.verified.models)):
            return open_graph  # with fixed cache buffers
        return partial(open_in_pieces, piece_bytes=PART_BYTES) if self.induction else open_in_pieces

    def changed(self, change: Callable[[onnx.ModelProto], None], named: str) -> Compared:
        """The same folder with graphs that are changed in memory; arguments as in `VerifiedFolder.changed`."""
        return replace(self, verified=self.verified.changed(change, named))

    def few(self) -> Compared | None:
        """The same folder with the scenarios that are also run on scaled weights; None if none was selected."""
        names = [row.name for row in self.selection.scenarios() if row.name in SCALED_SCENARIOS]
        return replace(self, selection=replace(self.selection, only=names)) if names else None


def compare_half_precision(compared: Compared, half: str, known: Eager | None) -> Checking:
    """Runs all scenarios on the graphs, a few with every value rounded, and all on copies that compute in float32.

    `half` is the dtype of the graphs, `float16` or `bfloat16`; `known` an open reference of the model, if any. Returns
    the reference and the graphs in which a faulty node is searched: the float32 copies.
    """
    kind = HALF_PRECISION[half]
    rounding = partial(round_every_value, half=kind)
    notes = compared.report.notes
    notes.append(f"the graphs compute in {half}; scenarios named `…{IN_FLOAT32}` run copies with the same weights")
    if half == WITHOUT_KERNELS and compared.on_cpu:
        notes.append(f"onnxruntime's CPU has no {half} kernels: nodes run in float32, results are rounded")
        eager, _ = yield from compared.changed(rounding, "").run(known, half, is_half=True)
    else:
        eager, _ = yield from compared.run(known, half, is_half=True)
        if few := compared.few():
            yield from few.changed(rounding, ROUNDED).run(eager, half, is_half=True)
    if eager is None:
        return eager, compared.verified
    constants = KnownConstants.of(read_json(compared.reference.folder / "config.json"), eager.rotary_frequencies())
    models = compared.verified.models.items()
    if unknown := [check for name, model in models for check in unknown_tables(name, model, kind, constants)]:
        compared.report.unseen.append("faults that the rounding of half precision hides")
        yield unknown
        return eager, compared.verified
    return (yield from compared.changed(partial(widen, half=kind, known=constants), IN_FLOAT32).run(eager, "float32"))


def unknown_tables(name: str, model: onnx.ModelProto, kind: int, known: KnownConstants) -> list[Check]:
    """Skipped checks for tables that the model's code rounds to half precision: no float32 copy of them is exact."""
    blank = Check(IN_FLOAT32.removeprefix(", "), name, "", verdict="skip")
    tables = [tensor for tensor in model.graph.initializer if tensor.data_type == kind and not is_external(tensor)]
    detail = "`{}` is a table that the model's code rounds: a float32 copy would keep its rounding"
    return [
        replace(blank, detail=detail.format(t.name)) for t in tables if not known.is_exact(numpy_helper.to_array(t))
    ]


def routes(model: onnx.ModelProto) -> bool:
    """Whether a graph chooses experts for each token; the likeliest tokens of `--postprocess topk:K` are outputs."""
    results = {port.name for port in model.graph.output}
    return any(node.op_type == "TopK" and not results.intersection(node.output) for node in model.graph.node)


def opened_checks(verified: VerifiedFolder, settings: SessionSettings) -> list[Check]:
    """A failed check for each graph that onnxruntime does not open; no cut hides what is wrong with the whole."""
    if in_steps := rounds_every_value(verified):
        verified = verified.changed(in_float32_steps, verified.named)
    problems = {name: why_not_opened(model, settings) for name, model in verified.models.items()}
    for entry in verified.entries:
        files = entry.stages if isinstance(entry, JoinedStages) else entry.files
        stages = {name: load_guarded(verified.path / name) for name in files if len(files) > 1}
        for model in stages.values() if in_steps else ():
            in_float32_steps(model)
        problems |= {name: why_not_opened(model, settings) for name, model in stages.items()}
        problems |= {name: text for name, text in odd_ports(stages).items() if not problems[name]}
    return [Check("structure", name, "", verdict="fail", detail=text) for name, text in problems.items() if text]


def odd_ports(stages: Mapping[str, onnx.ModelProto]) -> dict[str, str]:
    """By name of a stage, what it takes in another type than those before, or of other sizes than the tokens."""
    given: dict[str, str] = {}
    found: dict[str, str] = {}
    tokens, made = "", set[str]()  # the sizes of batch and tokens; what stages hand on
    for name, model in stages.items():
        for port in model.graph.input:
            kind = described(port)
            if port.name in ("input_ids", INPUTS_EMBEDS):
                tokens = ", ".join(kind.partition("[")[2].rstrip("]").split(", ")[:2])
            if given.get(port.name, kind) != kind:
                found[name] = f"it takes `{port.name[:200]}` in another type than the stage before"
            if port.name in made and "…" not in kind and not kind.partition("[")[2].startswith(tokens):
                found[name] = f"it takes `{port.name[:200]}` of other sizes than the tokens have"
            given.setdefault(port.name, kind)
        given |= {port.name: described(port) for port in model.graph.output}
        made |= {port.name for port in model.graph.output}
    return found


def structure_checks(
    verified: VerifiedFolder,
    settings: SessionSettings,
    report: Report,
    induction: Induction | None,
    audits: Checks,
    *,
    alone: bool = True,
) -> Checks:
    """All checks without numbers; `alone` as for `Induction.checks`."""
    if induction:
        report.odd_layers = induction.odd_layers()
        yield induction.checks(alone=alone)
    yield opened_checks(verified, settings)
    yield from audits
    report.statements = statements(induction, report, None) if induction else []
    report.unseen += WITHOUT_NUMBERS


def rounds_every_value(verified: VerifiedFolder) -> bool:
    """Whether nodes run in float32, with rounded results: onnxruntime's CPU has no kernels for bfloat16."""
    on_cpu = provider_name(verified.settings.provider) == CPU
    return on_cpu and any(half_precision(model) == WITHOUT_KERNELS for model in verified.models.values())


in_float32_steps = partial(round_every_value, half=HALF_PRECISION[WITHOUT_KERNELS])


def why_not_opened(model: onnx.ModelProto, settings: SessionSettings) -> str:
    """Why onnxruntime refuses a graph, unoptimized and with weights as inputs; empty if it opens it."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    stored = [tensor for tensor in copy.graph.initializer if is_external(tensor)]
    ports = [onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in stored]
    refill(copy.graph.initializer, [tensor for tensor in copy.graph.initializer if not is_external(tensor)])
    copy.graph.input.extend(ports)
    options = replace(settings, optimization="disable", change=None, packed_cache=None).options()
    try:
        LimitedSession(copy.SerializeToString(), options, ["CPUExecutionProvider"], TimeLimit(0, settings.timeout))
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise_if_out_of_memory(error, "while a graph was opened")
        return first_line(error)
    return ""


AUTO, INDUCTION, STRUCTURE = "auto", "induction", "structure"
METHODS = (AUTO, WHOLE, INDUCTION, STRUCTURE)
WORTH_WAITING = 60.0  # estimated seconds up to which `auto` runs the whole model
IN_MEMORY = 1 << 30  # bytes of the whole model up to which an induction holds its few layers in memory


@dataclass(frozen=True)
class Method:
    """The method that was asked for, one of `METHODS`, and which layers an induction runs by themselves.

    Raises UsageProblem: the method is unknown, or layers are chosen for a method that runs none by themselves.
    """

    name: str = AUTO
    layers: LayerChoice = field(default_factory=LayerChoice)

    @classmethod
    def of(cls, name: str, layers: str | None) -> Method:
        """The method by the options of the command; `layers` is None for the default, and else means an induction."""
        if name not in METHODS:
            raise UsageProblem(f"unknown method `{name[:40]}`", hint="give `" + "`, `".join(METHODS) + "`")
        if layers is not None and name in (WHOLE, STRUCTURE):
            raise UsageProblem(f"`--layers` does not apply to `--method {name}`", hint="give `--method induction`")
        return cls(name) if layers is None else cls(INDUCTION, LayerChoice(layers))

    def require_runs(self, session: Session, *, low_memory: bool | None) -> None:
        selection = session.selection
        given = {
            "--scenario": bool(selection.only),
            "--suite": selection.suite != Selection.suite,
            "--budget": selection.budget is not None,
            "--repeat": selection.repeat > 1,
            "--bisect": session.bisect,
            "--minimize": session.minimized is not None,
            "--low-memory": bool(low_memory),
        }
        if self.name == STRUCTURE and (option := next((name for name, is_given in given.items() if is_given), "")):
            raise UsageProblem(
                f"`--method {STRUCTURE}` runs no graph, so it excludes `{option}`", hint=f"leave out `{option}`"
            )

    @property
    def is_forced(self) -> bool:
        return self.name in (INDUCTION, STRUCTURE)


@dataclass(frozen=True)
class Plan:
    """The method that a verification uses: `whole`, `induction` or `structure`."""

    method: str
    induction: Induction | None = None  # None where the whole model runs, or no layers were found
    note: str = ""  # why this method; empty where it was asked for


def planned(
    method: Method,
    verified: VerifiedFolder,
    reference: ComputedModel,
    source: WeightSource,
    session: Session,
    low_memory: bool | None,
    code: Path | None,
    *,
    quantized: bool = False,
) -> Plan:
    """The method for a folder of graphs; with `auto`, a choice of `low_memory` means the whole model."""
    if method.name == WHOLE or (method.name == AUTO and low_memory is not None):
        return Plan(WHOLE)
    estimate = (CostEstimate.of_quantized if quantized else CostEstimate.of)(source.reference, 1)
    if method.name == AUTO and estimate.elements * estimate.seconds <= WORTH_WAITING:
        return Plan(WHOLE)
    if why_not := _why_not(verified, session, method.name):
        return _without(method.name, why_not)
    try:
        layered = {name: model for name, model in verified.models.items() if len(model.graph.output) > 1}
        induction = Induction.of(layered, source, reference, code, method.layers)
    except NotLayered as odd:
        return _without(method.name, str(odd))
    except (KeyError, IndexError, ValueError, StopIteration) as odd:  # not a valid graph; opening it says why
        return _without(method.name, f"a graph cannot be analyzed: {first_line(odd)}")
    if method.name != STRUCTURE and any(map(_reads_buffers_before, induction.classes.graphs.values())):
        return _without(method.name, "the part before the layers reads a cache buffer")
    if induction.is_whole and method.name != STRUCTURE:
        return _without(method.name, "no two of its layers are alike")
    time = f"the whole model would take {estimate.minutes}"
    note = f"by induction over layers: {time}; `--method whole` runs it"
    return Plan(STRUCTURE if method.name == STRUCTURE else INDUCTION, induction, note if method.name == AUTO else "")


def _reads_buffers_before(graph: GraphLayers) -> bool:
    """Whether nodes before the layers of a graph with fixed cache buffers read one, which their calls do not have."""
    read = {name for at in graph.prologue for name in graph.index.reads[at]}
    return fixed_sizes(graph.index.model) is not None and any(map(is_past, read & graph.index.inputs.keys()))


def with_cuts(verified: VerifiedFolder) -> VerifiedFolder:
    """The folder with graphs that are cut at one value, also if the norms after the cuts add two."""
    fused = any(node.op_type in SUMMING for model in verified.models.values() for node in model.graph.node)
    return verified.changed(add_before_norms, verified.named) if fused else verified


INNER, LOGITS = "postprocess/logits", "logits"
"""Names of the logits before the choice, in these graphs and in those without `--postprocess`."""


def restore_logits(model: onnx.ModelProto) -> None:
    """Returns the logits in place of tokens and scores, in place; other graphs stay as they are."""
    made = {name for node in model.graph.node for name in node.output}
    if INNER not in made or LOGITS in made:
        return
    model.graph.node.append(onnx.helper.make_node("Identity", [INNER], [LOGITS], name=f"{INNER}/restored"))
    kept = [port for port in model.graph.output if port.name not in ("tokens", "scores")]
    refill(model.graph.output, [onnx.ValueInfoProto(name=LOGITS), *kept])


def with_logits(verified: VerifiedFolder) -> VerifiedFolder:
    """The folder with graphs that are changed in memory; the same one if all of them return logits."""
    if not any(entry.postprocess for entry in verified.entries):
        return verified
    entries: list[GraphEntry] = [replace(entry, postprocess="") for entry in verified.entries]
    return replace(verified.changed(restore_logits, verified.named), entries=entries)


def _without(method: str, why_not: str) -> Plan:
    if method == STRUCTURE:
        return Plan(STRUCTURE, None, f"not shown: {why_not}")
    return Plan(WHOLE, None, f"the whole model is run, without induction: {why_not}")


def _why_not(verified: VerifiedFolder, session: Session, method: str) -> str:
    """Why layers cannot be cut out; empty if they can."""
    if any(entry.prefix for entry in verified.entries):
        return "a graph has a prefix"
    if method == STRUCTURE:
        return ""
    if small := next(filter(None, map(too_small, verified.models.values())), ""):
        return small
    if session.bisect or session.minimized or session.selection.repeat > 1:
        return "`--repeat`, `--bisect` and `--minimize` run the whole model"
    if provider_name(session.settings.provider) != CPU:
        return "`--provider` runs the whole model"
    return "the graphs take embeddings" if takes_embeddings(verified.models.values()) else ""


def holds_one_layer(verified: VerifiedFolder, reference: ComputedModel) -> bool:
    """Whether an induction holds the weights of one layer at a time, because the model is not small."""
    files = [path for entry in verified.entries for path in entry.paths(verified.path)]
    small = CostEstimate.of(reference.tensors, distinct_files(files)).whole <= IN_MEMORY
    return not small and not any(entry.prefix for entry in verified.entries)
