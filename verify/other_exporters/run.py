"""verify_graphs: compares graphs of any exporter with the eager model, in the scenarios of llmconv's own graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf, prod
from pathlib import Path

import numpy as np
import onnx

from llmconv.argument_checks import checked
from llmconv.checkpoint import open_weights, read_json
from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.files.paths import Written
from llmconv.files.sources import fetches, local_path, source_name
from llmconv.runtime.onnxruntime.session_settings import HALF_PRECISION, SessionSettings, with_options
from llmconv.tensors import LazyTensor
from llmconv.verify.audit.decisions import MASK, POSITION, TOKEN, audit_foreign_decisions, read_config
from llmconv.verify.audit.structure import dead_inputs
from llmconv.verify.audit.weights import initializer_values, misplaced_weights, reference_name
from llmconv.verify.comparison.half_precision import WITHOUT_KERNELS, most_precise
from llmconv.verify.other_exporters.comparison import ExternalComparison
from llmconv.verify.other_exporters.external_graph import (
    CacheShapesByName,
    ExternalGraph,
    GraphFile,
    ModelSizes,
    read_graphs,
)
from llmconv.verify.other_exporters.half_precision import compare_half_precision, rounded_weights, rounding_copy
from llmconv.verify.other_exporters.port_map import AUTO, AXES, input_names
from llmconv.verify.other_exporters.quantized.accuracy import AccuracyLimits
from llmconv.verify.other_exporters.quantized.audit import (
    KnownErrors,
    audit_quantized,
    float_copies,
    match_zeros,
    slow_layouts,
)
from llmconv.verify.other_exporters.quantized.dequantized_reference import restacked
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants
from llmconv.verify.other_exporters.quantized.rounding_error import ExpectedCodes
from llmconv.verify.other_exporters.quantized.schemes import quantized_matrices
from llmconv.verify.other_exporters.quantized.tensor_matching import (
    PREFIX,
    InitializerContent,
    match_contents,
    match_matrices,
)
from llmconv.verify.other_exporters.quantized_verdict import QuantizationOptions, compare_quantized
from llmconv.verify.other_exporters.replay import ExternalGraphs
from llmconv.verify.reference.cost_estimate import CostEstimate, choose
from llmconv.verify.reference.eager import ComputedModel, Eager
from llmconv.verify.report.files import reporter
from llmconv.verify.results import Check, Checks, Quantization, Report, audited
from llmconv.verify.scenarios.selection import Budget, Selection
from llmconv.verify.verification import Checking, OnChecks, Session


@fetches
@checked
def verify_graphs(  # noqa: PLR0913 - one parameter per option of the command
    paths: Sequence[str | Path],
    *,
    reference: str | Path | None = None,
    input_map: str = AUTO,
    suite: str = "quick",
    scenario: str | Sequence[str] = (),
    repeat: int = 1,
    settings: SessionSettings | None = None,
    provider: str | None = None,
    threads: int | None = None,
    timeout: float | None = None,
    on_checks: OnChecks | None = None,
    eager: Eager | None = None,
    trust_remote_code: bool = False,
    bisect: bool = False,
    minimize: Written | None = None,
    text: str | Path | None = None,
    max_divergence: float | None = None,
    min_agreement: float | None = None,
    budget: float | None = None,
    report: Written | None = None,
) -> Report:
    """Compares a graph of any exporter, or a prefill and a decode graph, with the eager model.

    Args:
        paths: one or two graph files.
        reference: Hugging Face folder of the model; default: the folder of the graph.
        input_map: name of an input map, see `maps`; `auto`; or a JSON file.
        suite, scenario, repeat, settings, provider, threads, timeout, on_checks, eager, trust_remote_code, bisect,
            minimize, budget, report: as for `verify`.
        text: text file on which the accuracy of quantized weights is measured; default: a text that ships with llmconv.
        max_divergence: maximum mean divergence from the model at full precision, in nats per token.
        min_agreement: minimum share of tokens with the same most likely next token.

    Raises:
        UsageProblem: no graph or too many, no reference, an unknown map, or a decode graph alone.
        InputRefused: a graph fits no map or is refused, see `guard`, or memory does not suffice.
        OutOfMemory: memory ran out.
    """
    require_limits(max_divergence=max_divergence, min_agreement=min_agreement)
    written = reporter(report)
    only = [scenario] if isinstance(scenario, str) else scenario
    selection = Selection(suite, only, repeat, Budget.of(budget, only))
    own = with_options(settings, provider, threads, timeout)
    session = Session.of(selection, own, on_checks, bisect=bisect, minimize=minimize)
    files = read_graphs(paths, input_map)
    folder = _reference(files[0].path, reference)
    if eager is None:
        estimate = CostEstimate.of(open_weights(folder), len(files))
        choose(estimate, None, "that takes a folder that `llmconv export` wrote")
    made = session.new_report(" and ".join(file.name for file in files))
    made.reference = source_name(folder)
    limits = AccuracyLimits(max_divergence, min_agreement)
    options = QuantizationOptions(Path(text) if text else None, limits, code=folder if trust_remote_code else None)
    verified = ExternalGraphs(files, ModelSizes({}), session.settings, open_weights(folder))
    with ExitStack() as stack:
        checks = _checks(verified, folder, made, session, eager, options, stack)
        return written(session.run(made, checks, most_precise))


def require_limits(*, max_divergence: float | None, min_agreement: float | None) -> None:
    """Raises UsageProblem for limits (nats per token, share of tokens) that every graph or no graph meets."""
    if max_divergence is not None and not 0 <= max_divergence < inf:
        raise UsageProblem(f"`max_divergence` is {max_divergence}", hint="give a finite number of nats, 0 or more")
    if min_agreement is not None and not 0 <= min_agreement <= 1:
        raise UsageProblem(f"`min_agreement` is {min_agreement}", hint="give a share from 0 to 1")


def _checks(
    verified: ExternalGraphs,
    folder: Path,
    report: Report,
    session: Session,
    known: Eager | None,
    options: QuantizationOptions,
    stack: ExitStack,
) -> Checking:
    """Audits, then all scenarios, in the way for quantized weights, half precision or neither.

    Returns the reference and the graphs in which a faulty node is searched.
    """
    files, tensors = verified.files, verified.tensors
    yield from audit_graph_weights(files, tensors, read_json(folder / "config.json"), report, options.codes)
    yield from _audit_decisions(files, folder, report)
    model = as_in_graphs(ComputedModel(folder), files, tensors)
    half = half_of(files)
    own = model.weights is not None or known is None
    eager = Eager(folder, half or files[0].dtype, code=options.code, weights=model.weights) if own else known
    assert eager is not None
    eager = (eager.in_dtype(half) if half else eager).with_defaults()
    sizes, settings = ModelSizes(eager.cache_shapes(), max(eager.facts().windows, default=None)), verified.settings
    if report.quantization:  # some kernels support only prepacked quantized weights
        settings = replace(settings, prepack=True)
    verified = replace(verified, sizes=sizes, settings=settings)
    ran = [stack.enter_context(rounding_copy(file)) if file.dtype == WITHOUT_KERNELS else file for file in files]
    graphs = yield from _open(ran, sizes, settings)
    if len(graphs) < len(files):
        return eager, verified
    report.notes += [note for file, graph in zip(files, graphs, strict=True) for note in _notes(file, graph)]
    comparison = ExternalComparison(sizes, settings, tensors, session.selection, report)
    if report.quantization:
        return (yield from compare_quantized(replace(verified, files=ran), graphs, eager, comparison, options, stack))
    if half:
        return (yield from compare_half_precision(verified, graphs, eager, comparison, stack))
    yield from comparison.run(eager, files)
    return eager, verified


def as_in_graphs(model: ComputedModel, files: Sequence[GraphFile], tensors: Mapping[str, LazyTensor]) -> ComputedModel:
    """The model with weights rounded as in half-precision graphs; the same one if that changes nothing."""
    half = half_of(files)
    rounded = rounded_weights(tensors, files, half) if half else tensors
    return model if rounded is tensors else replace(model, weights=restacked(rounded))


def half_of(files: Sequence[GraphFile]) -> str:
    """The dtype of the graphs if it is half precision, else empty."""
    return next((file.dtype for file in files if file.dtype in HALF_PRECISION), "")


def _reference(path: Path, reference: str | Path | None) -> Path:
    folder = local_path(reference) if reference else path.parent
    if reference is None and not any(folder.glob("*.safetensors")):
        raise UsageProblem(
            f"`{folder}` has no weights to compare `{path.name}` with", hint="give `--reference HF_FOLDER`"
        )
    return folder


def audit_graph_weights(
    files: Sequence[GraphFile],
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, object],
    report: Report,
    codes: ExpectedCodes,
) -> Checks:
    """Audits the weights of each graph; tensors of the model that are in no graph are a note.

    `files` receive what was found; tensors have factors of smoothing; `codes` is what the codes must be.
    """
    missing, known = set(tensors), KnownErrors()
    tied = bool(config.get("tie_word_embeddings"))
    for file in files:
        if file.quantized:
            yield from _audit_quantized(file, tensors, report, codes, known)
        scales = {one.stored.scales for one in file.quantized_weights}
        file.contents = initializer_contents(file.model, file.path.parent, tensors, scales)
        found = {name for one in file.quantized_weights for name in one.names}
        copies = float_copies(file.contents, file.quantized_weights, file.model, tied=tied)
        report.notes += [f"{file.name}: {note}" for note in copies]
        missing -= found | {name for content in file.contents.values() for name in content.names}
        yield [audit_contents(file.name, file.contents, tensors)]
        report.notes += [f"{file.name}: {problem}, and was not compared" for problem in misplaced_weights(file.model)]
    if missing and len(missing) < len(tensors):
        report.notes.append(f"{len(missing)} tensors of the model are in no graph, first `{min(missing)}`")


def _audit_decisions(files: Sequence[GraphFile], reference: Path, report: Report) -> Checks:
    """Audits constants for lengths, positions and tokens that are not in the model's config."""
    config = read_config(reference)
    for file in files:
        row = file.binding.port_map
        inputs = {row.tokens: TOKEN, row.mask: MASK, row.positions: POSITION}
        checks, notes = audit_foreign_decisions(file.name, file.model, config, inputs)
        yield checks
        report.notes += notes


def _audit_quantized(
    file: GraphFile, tensors: Mapping[str, LazyTensor], report: Report, codes: ExpectedCodes, known: KnownErrors
) -> Checks:
    report.quantization = report.quantization or Quantization()
    constants = Constants(file.model, file.path.parent)
    report.notes += [f"{file.name}: {note}" for note in slow_layouts(file.model, constants)]
    try:
        stored = quantized_matrices(file.model, constants)
    except UnsupportedInput as error:
        file.unreadable = error.message
        return
    file.quantized_weights = match_matrices(stored, tensors)
    match_zeros(file.quantized_weights, tensors)
    check, rows = audit_quantized(file.name, file.quantized_weights, tensors, codes, known)
    report.quantization.weights += rows
    yield [check] if stored else []


def _open(
    files: Sequence[GraphFile], sizes: ModelSizes, settings: SessionSettings
) -> Generator[list[Check], None, list[ExternalGraph]]:
    """Opens the graphs and checks their caches; returns those that passed."""
    graphs = []
    for file in files:
        graph = file.open(sizes, settings)
        check = graph if isinstance(graph, Check) else check_cache(graph, sizes.cache_shapes)
        if not isinstance(graph, Check) and check.verdict == "pass":
            graphs.append(graph)
        if file.unreadable and check.verdict == "pass":
            check = replace(check, verdict="skip", detail=file.unreadable)
        yield [check]
    return graphs


def _notes(file: GraphFile, graph: ExternalGraph) -> list[str]:
    notes = dead_inputs(file.model, input_names(file.model))
    if not graph.outputs:
        notes.append("returns no keys and values, so only its logits are compared")
    if not graph.keeps_cache:
        notes.append("takes no past, so every step runs the whole sequence")
    if graph.limits.tokens == 1:
        notes.append("takes one token, so several tokens run one after another")
    if graph.limits.rings:
        notes.append("keeps its sliding layers in ring buffers, which have room for the window and 512 new tokens")
    return [f"{file.name}: {note}" for note in notes]


def check_cache(graph: ExternalGraph, cache_shapes: CacheShapesByName) -> Check:
    """Checks that every layer has a key and a value with the model's heads and head size; no cache is allowed, too."""
    problems = []
    for kind, found in (("past", graph.binding.past), ("present", graph.binding.present)):
        odd = found.keys() ^ cache_shapes.keys()
        if found and odd:
            counts = f"{len(found)} of {len(cache_shapes)} keys and values"
            problems.append(f"its {kind} has {counts}, first difference: {min(odd)}")
    problems += _sizes(graph, cache_shapes)
    return audited("structure", graph.name, problems, f"inputs and outputs named as by {graph.binding.port_map.title}")


def _sizes(graph: ExternalGraph, cache_shapes: CacheShapesByName) -> list[str]:
    problems = []
    axes = graph.binding.port_map.axes
    for ports in (graph.binding.past, graph.binding.present):
        for name, port in ports.items():
            shape = graph.shapes[port]
            if len(shape) != len(AXES):
                problems.append(f"{port} has {len(shape)} axes, expected {len(AXES)}")
                continue
            for letter, at in (("h", 1), ("d", 3)):
                size = shape[axes.index(letter)]
                if isinstance(size, int) and name in cache_shapes and size != cache_shapes[name][at]:
                    problems.append(f"{port} has an axis of size {size}, expected {cache_shapes[name][at]}")
    return problems


SHOWN = 3
FLOAT_TYPES = {getattr(onnx.TensorProto, name) for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")}


def initializer_contents(
    model: onnx.ModelProto, folder: Path, reference: Mapping[str, LazyTensor], excluded: Collection[str] = ()
) -> dict[str, InitializerContent]:
    """Every larger float initializer that is not excluded, matched with the model's tensors."""
    contents = {
        tensor.name: _content(tensor, folder)
        for tensor in model.graph.initializer
        if tensor.data_type in FLOAT_TYPES and tensor.name not in excluded
        if prod(tensor.dims) >= PREFIX or reference_name(tensor.name, reference)
    }
    match_contents(contents, reference)
    return contents


def _content(tensor: onnx.TensorProto, folder: Path) -> InitializerContent:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return InitializerContent(tuple(tensor.dims), dtype, lambda: np.asarray(initializer_values(tensor, folder)))


def audit_contents(
    graph: str, contents: Mapping[str, InitializerContent], reference: Mapping[str, LazyTensor]
) -> Check:
    """One check: an initializer with a tensor's name but other content fails; unknown content does not."""
    wrong = [
        f"`{name}` differs from the model's tensor of that name"
        for name, content in contents.items()
        if (named := reference_name(name, reference)) and named not in content.names
    ]
    matched = [content for content in contents.values() if content.matched]
    verdict = "fail" if wrong else "pass" if matched else "skip"
    return Check("weights", graph, "", verdict=verdict, detail="; ".join(wrong[:5]) or _summary(contents, matched))


def _summary(contents: Mapping[str, InitializerContent], matched: list[InitializerContent]) -> str:
    counts = Counter(content.form or "as they are" if content.whole else "in parts" for content in matched)
    forms = ", ".join(f"{count} {form}" for form, count in counts.items())
    other = [name for name, content in contents.items() if not content.matched]
    rest = f"; others: {', '.join(f'`{name[:60]}`' for name in other[:SHOWN])}" + (" …" if other[SHOWN:] else "")
    return f"{len(matched)} of {len(contents)} are the model's by content ({forms or 'none'})" + (rest if other else "")
