"""verify_graphs: graphs of any exporter against the eager model; the scenarios are those of llmconv's own graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import isnan
from pathlib import Path

from llmconv.argument_checks import checked, require_least
from llmconv.checkpoint import open_weights
from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.files.paths import Written
from llmconv.files.sources import fetches, local_path
from llmconv.memory import reporting_out_of_memory
from llmconv.runtime.onnxruntime.runner import SessionSettings
from llmconv.tensors import LazyTensor
from llmconv.verify.audit.decisions.affine_forms import MASK, POSITION, TOKEN
from llmconv.verify.audit.decisions.audit import audit_foreign_decisions, read_config
from llmconv.verify.audit.weights import misplaced_weights
from llmconv.verify.bisect.first_difference import localise
from llmconv.verify.other_exporters.comparison import ForeignComparison, OnChecks
from llmconv.verify.other_exporters.graph_file import GraphFile, read_graphs
from llmconv.verify.other_exporters.half_precision.float32_copy import EMULATED, HALVES, emulated
from llmconv.verify.other_exporters.half_precision.rounded_reference import rounded_reference
from llmconv.verify.other_exporters.maps import AUTO
from llmconv.verify.other_exporters.quantized.accuracy_cost import Limits
from llmconv.verify.other_exporters.quantized.audit import audit_quantized
from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.kinds import stored_weights
from llmconv.verify.other_exporters.quantized.tensor_matching import find_tensors
from llmconv.verify.other_exporters.replay import Graphs
from llmconv.verify.other_exporters.session import ForeignGraph, Model
from llmconv.verify.other_exporters.structure import check_ports, dead_inputs
from llmconv.verify.other_exporters.verdicts.half_precision import compare_halves, sharpest
from llmconv.verify.other_exporters.verdicts.quantized import Asked, compare_quantized
from llmconv.verify.other_exporters.weights import absent, audit_contents, contents_of
from llmconv.verify.reference.cost_estimate import Forecast, choose
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.quantization import Quantization
from llmconv.verify.results.report import Check, Report
from llmconv.verify.session import collector, look_closer, new_piece, new_report, require_suite


@fetches
@checked
def verify_graphs(  # noqa: PLR0913 - one parameter per option of the command
    paths: Sequence[str | Path],
    *,
    reference: str | Path | None = None,
    input_map: str = AUTO,
    suite: str = "quick",
    only: Sequence[str] = (),
    repeat: int = 1,
    settings: SessionSettings | None = None,
    on_checks: OnChecks | None = None,
    eager: Eager | None = None,
    trust_remote_code: bool = False,
    bisect: bool = False,
    minimize: Written | None = None,
    text: str | Path | None = None,
    max_divergence: float | None = None,
    min_agreement: float | None = None,
) -> Report:
    """Compares a graph of any exporter, or those of prompt and steps, with the eager model; arguments as in `verify`.

    Args:
        paths: one file, or two.
        reference: the Hugging Face folder of the model; the graph's own folder when left out.
        input_map: name of a row of `maps`, `auto`, or a JSON file.
        suite, only, repeat, settings, on_checks, eager, trust_remote_code, bisect, minimize: as for `verify`.
        text: a file on which it is measured what quantised weights cost, in place of random tokens.
        max_divergence: a larger mean divergence from the model at full precision fails, in nats per token.
        min_agreement: a smaller share of tokens with the same likeliest next one fails.

    Raises:
        UsageProblem: no graph or too many, no reference, an unknown map, or a graph of steps without one of the prompt.
        InputRefused: a graph fits no map, or refers to what it must not, or memory does not suffice.
        OutOfMemory: memory ran out on the way.
    """
    require_numbers(max_divergence=max_divergence, min_agreement=min_agreement)
    require_suite(suite)
    require_least(repeat, 1, "repeat")
    piece, settings = new_piece(minimize), settings or SessionSettings()
    files = read_graphs(paths, input_map)
    folder = _reference(files[0].path, reference)
    if eager is None:
        choose(Forecast.of(folder, len(files)), None, "that takes a folder that `llmconv export` wrote")
    report = new_report(" and ".join(file.name for file in files), suite, only, repeat, settings)
    report.reference = folder.name
    limits = Limits(max_divergence, min_agreement)
    asked = Asked(Path(text) if text else None, limits, folder if trust_remote_code else None)
    verified, add = Graphs(files, Model({}), settings, open_weights(folder)), collector(report, on_checks)
    _audit(files, verified.tensors, report, add)
    _audit_decisions(files, folder, report, add)
    with ExitStack() as stack, reporting_out_of_memory(f"while {report.folder} was verified"):
        eager, verified = _compare(verified, eager or folder, report, add, asked, stack)
        report.where = localise(sharpest(report.checks))
        look_closer(report, verified, eager, piece, bisect=bisect)
    return report


def require_numbers(**limits: float | None) -> None:
    """Refuses NaN, which nothing is larger or smaller than: the gate would always be open.

    Raises:
        UsageProblem: one is NaN.
    """
    for name, value in limits.items():
        if value is not None and isnan(value):
            raise UsageProblem(f"`{name}` is not a number", hint="with NaN nothing would fail")


def _compare(
    verified: Graphs, reference: Eager | Path, report: Report, add: OnChecks, asked: Asked, stack: ExitStack
) -> tuple[Eager, Graphs]:
    """All scenarios, in the way that quantised weights, half precision or neither demand.

    Args:
        reference: the model, or its folder.
        stack: keeps temporary copies.

    Returns:
        What a node is to be looked for in, and the model to compare it with.
    """
    files = verified.files
    half = next((file.dtype for file in files if file.dtype in HALVES), "")
    eager = _eager(verified, reference, half, asked.code, stack)
    facts, settings = Model(eager.cache_shapes(), max(eager.facts().windows, default=None)), verified.settings
    if report.quantization:  # some kernels for quantised weights take them only in a layout of their own
        settings = replace(settings, prepack=True)
    verified = replace(verified, facts=facts, settings=settings)
    ran = [stack.enter_context(emulated(file)) if file.dtype == EMULATED else file for file in files]
    graphs = _open(ran, facts, settings, add)
    if len(graphs) < len(files):
        return eager, verified
    report.notes += [note for file, graph in zip(files, graphs, strict=True) for note in _notes(file, graph)]
    by = ForeignComparison(facts, settings, verified.tensors, report, add)
    if report.quantization:
        return compare_quantized(replace(verified, files=ran), graphs, eager, by, asked, stack)
    if half:
        return compare_halves(verified, graphs, eager, by, stack)
    by.run(eager, files)
    return eager, verified


def _eager(verified: Graphs, reference: Eager | Path, half: str, code: Path | None, stack: ExitStack) -> Eager:
    """The model, of a graph in half precision with weights as that holds them."""
    folder = reference if isinstance(reference, Path) else reference.folder
    held = folder
    if half:
        held = stack.enter_context(rounded_reference(folder, verified.tensors, verified.files, half))
    if isinstance(reference, Eager) and held.resolve() == folder.resolve():
        eager = reference
    else:
        eager = Eager(held, half or verified.files[0].dtype, code=code)
    return eager.in_dtype(half) if half else eager


def _reference(path: Path, reference: str | Path | None) -> Path:
    folder = local_path(reference) if reference else path.parent
    if reference is None and not any(folder.glob("*.safetensors")):
        raise UsageProblem(
            f"`{folder}` holds no model to compare `{path.name}` with", hint="give `--reference HF_FOLDER`"
        )
    return folder


def _audit(files: Sequence[GraphFile], tensors: Mapping[str, LazyTensor], report: Report, add: OnChecks) -> None:
    """One check per graph, two where weights are quantised; tensors that are in none are a note."""
    missing = set(tensors)
    for file in files:
        if file.quantized:
            _audit_quantized(file, tensors, report, add)
        scales = {one.stored.scales for one in file.found}
        file.contents = contents_of(file.model, file.path.parent, tensors, scales)
        missing &= absent(file.contents, tensors) - {name for one in file.found for name in one.names}
        add([audit_contents(file.name, file.contents, tensors)])
        report.notes += [f"{file.name}: {problem}, and was not compared" for problem in misplaced_weights(file.model)]
    if missing and len(missing) < len(tensors):
        report.notes.append(f"{len(missing)} tensors of the model are in no graph as they are, first `{min(missing)}`")


def _audit_decisions(files: Sequence[GraphFile], reference: Path, report: Report, add: OnChecks) -> None:
    """Lengths, positions and tokens that a graph asks for and no config has."""
    config = read_config(reference)
    for file in files:
        row = file.binding.port_map
        inputs = {row.tokens: TOKEN, row.mask: MASK, row.positions: POSITION}
        checks, notes = audit_foreign_decisions(file.name, file.model, config, inputs)
        add(checks)
        report.notes += notes


def _audit_quantized(file: GraphFile, tensors: Mapping[str, LazyTensor], report: Report, add: OnChecks) -> None:
    """Reads the quantised matrices, and finds them among the model's tensors."""
    report.quantization = report.quantization or Quantization()
    try:
        stored = stored_weights(file.model, Constants(file.model, file.path.parent))
    except UnsupportedInput as error:
        file.unread = error.message
        return
    file.found = find_tensors(stored, tensors)
    check, rows = audit_quantized(file.name, file.found, tensors)
    report.quantization.weights += rows
    add([check] if stored else [])


def _open(files: Sequence[GraphFile], facts: Model, settings: SessionSettings, add: OnChecks) -> list[ForeignGraph]:
    """The graphs that onnxruntime opens and whose cache is the model's; what weights are unknown is said."""
    graphs = []
    for file in files:
        graph = file.open(facts, settings)
        check = graph if isinstance(graph, Check) else check_ports(graph, facts.cache_shapes)
        if not isinstance(graph, Check) and check.verdict == "pass":
            graphs.append(graph)
        add([replace(check, verdict="skip", detail=file.unread) if file.unread and check.verdict == "pass" else check])
    return graphs


def _notes(file: GraphFile, graph: ForeignGraph) -> list[str]:
    """What is odd about a graph, and how it is called for that."""
    notes = [f"input `{name}` has no effect" for name in dead_inputs(file.model)]
    if not graph.outputs:
        notes.append("gives no keys and values, so its logits alone are compared")
    if not graph.keeps_cache:
        notes.append("takes no past, so it is given the whole sequence at every step")
    if graph.limits.tokens == 1:
        notes.append("takes one token, so several are given one after another")
    if graph.limits.rings:
        notes.append("keeps its sliding layers in rings, which are given room for the window and 512 new tokens")
    return [f"{file.name}: {note}" for note in notes]
