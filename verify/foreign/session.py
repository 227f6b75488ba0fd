"""verify_graphs: graphs of any exporter against the eager model; the scenarios are those of llmconv's own graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from llmconv.checkpoint import open_weights, read_json
from llmconv.errors import UsageProblem
from llmconv.runtime.ort import SessionSettings
from llmconv.tensors import LazyTensor
from llmconv.verify.bisect import name_node
from llmconv.verify.compare import GATES
from llmconv.verify.evidence import Evidence
from llmconv.verify.foreign.candidate import check_foreign, foreign_candidates
from llmconv.verify.foreign.constants import Known
from llmconv.verify.foreign.files import GraphFile, read_graphs
from llmconv.verify.foreign.graph import ForeignGraph, Model
from llmconv.verify.foreign.halves import (
    EMULATED,
    HALVES,
    IN_FLOAT32,
    ROUNDED,
    emulated,
    half_notes,
    unknown_tables,
    widened,
)
from llmconv.verify.foreign.maps import AUTO
from llmconv.verify.foreign.replay import Graphs
from llmconv.verify.foreign.rounding import rounded_reference
from llmconv.verify.foreign.structure import check_ports, dead_inputs
from llmconv.verify.foreign.twin import scaled_graph, why_no_scaling
from llmconv.verify.foreign.weights import absent, audit_contents, contents_of
from llmconv.verify.localise import localise
from llmconv.verify.minimize import require_new
from llmconv.verify.report import Check, Report
from llmconv.verify.scenarios import chosen, scenarios
from llmconv.verify.session import collector, library_versions, recorded, require_suite
from llmconv.verify.truth import Eager
from llmconv.verify.twin import CHANGES, Change
from llmconv.verify.twin import SCENARIOS as TWIN_SCENARIOS

OnChecks = Callable[[list[Check]], None]


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
    minimize: str | Path | None = None,
) -> Report:
    """Compares a graph of any exporter, or those of prompt and steps, with the eager model; arguments as in `verify`.

    Args:
        paths: one file, or two.
        reference: the Hugging Face folder of the model; the graph's own folder when left out.
        input_map: name of a row of `maps`, `auto`, or a JSON file.
        suite, only, repeat, settings, on_checks, eager, trust_remote_code, bisect, minimize: as for `verify`.

    Raises:
        UsageProblem: no graph or too many, no reference, an unknown map, or a graph of steps without one of the prompt.
        InputRefused: a graph fits no map, or refers to what it must not.
    """
    require_suite(suite)
    piece = Path(minimize) if minimize else None
    if piece:
        require_new(piece)
    files = read_graphs(paths, input_map)
    folder = _reference(files[0].path, reference)
    report = Report(" and ".join(file.name for file in files), folder.name, suite, versions=library_versions())
    report.settings = recorded(settings or SessionSettings(), chosen(suite, only), repeat)
    add = collector(report, on_checks)
    settings, tensors = settings or SessionSettings(), open_weights(folder)
    _audit(files, tensors, report, add)
    half = next((file.dtype for file in files if file.dtype in HALVES), "")
    with ExitStack() as stack:
        held = stack.enter_context(rounded_reference(folder, tensors, files, half)) if half else folder
        if eager is None or (half and held.resolve() != eager.folder.resolve()):
            eager = Eager(held, half or files[0].dtype, code=folder if trust_remote_code else None)
        eager = eager.in_dtype(half) if half else eager
        facts = Model(eager.cache_shapes(), eager.facts().window)
        ran = [stack.enter_context(emulated(file)) if file.dtype == EMULATED else file for file in files]
        graphs = _open(ran, facts, settings, add)
        verified = Graphs(files, facts, settings, tensors)
        if len(graphs) == len(files):
            report.notes += [note for file, graph in zip(files, graphs, strict=True) for note in _notes(file, graph)]
            _compare(eager, graphs, report, add)
            if half:
                _compare_rounding(eager, verified, report, add)
                eager, verified = _compare_widened(eager, verified, report, add, stack)
            else:
                _compare_twins(eager, verified, report, add)
        report.where = localise(_sharpest(report.checks))
        if bisect or piece:
            name_node(report, verified, eager, piece)
    return report


def _compare_rounding(eager: Eager, verified: Graphs, report: Report, add: OnChecks) -> None:
    """A few scenarios with every value rounded, where onnxruntime's CPU runs half precision without doing so."""
    if all(file.dtype in {EMULATED, "float32"} for file in verified.files):
        return
    with ExitStack() as stack:
        copies = [stack.enter_context(emulated(file)) if file.dtype in HALVES else file for file in verified.files]
        if graphs := _opened(replace(verified, files=copies), add):
            _compare(eager, graphs, report, add, named=ROUNDED, few=True)


def _compare_widened(
    eager: Eager, verified: Graphs, report: Report, add: OnChecks, stack: ExitStack
) -> tuple[Eager, Graphs]:
    """All scenarios on float32 copies of half-precision graphs, which show what half precision hides.

    Returns:
        The copies with their reference, for the search for a node; the graphs where there can be no copies.
    """
    known = Known.of(read_json(eager.folder / "config.json"), eager.rotary_frequencies())
    report.notes += [note for file in verified.files for note in half_notes(file)]
    if unknown := [check for file in verified.files for check in unknown_tables(file, known, verified.tensors)]:
        add(unknown)
        return eager, verified
    wide = [stack.enter_context(widened(file, known)) if file.dtype in HALVES else file for file in verified.files]
    eager, copies = eager.in_dtype("float32"), replace(verified, files=wide, named=IN_FLOAT32)
    if graphs := _opened(copies, add):
        _compare(eager, graphs, report, add, named=IN_FLOAT32)
        _compare_twins(eager, copies, report, add)
    return eager, copies


def _opened(verified: Graphs, add: OnChecks, paths: Sequence[Path | None] = ()) -> list[ForeignGraph]:
    """All graphs, or copies of them at `paths`; none where one cannot be opened, which is a failed check."""
    places = paths or [None] * len(verified.files)
    pairs = zip(verified.files, places, strict=True)
    opened = [file.open(verified.facts, verified.settings, path) for file, path in pairs]
    add([graph for graph in opened if isinstance(graph, Check)])
    graphs = [graph for graph in opened if isinstance(graph, ForeignGraph)]
    return graphs if len(graphs) == len(opened) else []


def _sharpest(checks: list[Check]) -> list[Check]:
    """The checks of the float32 copy, where those found something: half precision would place it too late."""
    sharp = [check for check in checks if not check.output or check.name.endswith(IN_FLOAT32)]
    return sharp if any(check.verdict == "fail" and check.output for check in sharp) else checks


def _reference(path: Path, reference: str | Path | None) -> Path:
    folder = Path(reference) if reference else path.parent
    if reference is None and not any(folder.glob("*.safetensors")):
        raise UsageProblem(
            f"`{folder}` holds no model to compare `{path.name}` with", hint="give `--reference HF_FOLDER`"
        )
    return folder


def _audit(files: Sequence[GraphFile], tensors: Mapping[str, LazyTensor], report: Report, add: OnChecks) -> None:
    """One check per graph; tensors that are in none are a note."""
    missing = set(tensors)
    for file in files:
        file.contents = contents_of(file.model, file.path.parent, tensors)
        missing &= absent(file.contents, tensors)
        add([audit_contents(file.name, file.contents, tensors)])
    if missing and len(missing) < len(tensors):
        report.notes.append(f"{len(missing)} tensors of the model are in no graph as they are, first `{min(missing)}`")


def _open(files: Sequence[GraphFile], facts: Model, settings: SessionSettings, add: OnChecks) -> list[ForeignGraph]:
    """The graphs that onnxruntime opens, whose cache is the model's and whose weights are not quantised."""
    graphs = []
    for file in files:
        graph = file.open(facts, settings)
        check = graph if isinstance(graph, Check) else check_ports(graph, facts.cache_shapes)
        if file.quantized and check.verdict == "pass":
            reason = f"`{file.quantized}` has weights of its own rounding, so the model says nothing of its numbers"
            check = replace(check, verdict="skip", detail=reason)
        add([check])
        if not isinstance(graph, Check) and check.verdict == "pass":
            graphs.append(graph)
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


def _compare(
    eager: Eager,
    graphs: Sequence[ForeignGraph],
    report: Report,
    add: OnChecks,
    change: Change | None = None,
    named: str = "",
    few: bool = False,
) -> None:
    """All scenarios on every graph that can begin alone, and on two together; or `few`, as of twins."""
    found = foreign_candidates(graphs)
    repeat = report.settings["repeat"]
    for scenario, chains in scenarios(report.suite, eager.facts(), tuple(report.settings["seeds"])):
        if (change or few) and scenario.name not in TWIN_SCENARIOS:
            continue
        row = replace(scenario, name=f"{scenario.name}, {change.name}", bug=change.bug) if change else scenario
        truths = eager.truths(row, chains)
        row = replace(row, name=f"{row.name}{named}")
        for candidate in found:
            if len(candidate.foreign) == 1 or any(len(chain) > 1 for chain in chains):
                seen = Evidence() if change else report.evidence.setdefault(f"{candidate.name}{named}", Evidence())
                add(check_foreign(row, chains, candidate, truths, eager, GATES[eager.dtype], seen, repeat))


def _compare_twins(eager: Eager, verified: Graphs, report: Report, add: OnChecks) -> None:
    """A few scenarios on scaled weights."""
    files, tensors = verified.files, verified.tensors
    reasons = [why_no_scaling(file.contents, tensors, report.suite) for file in files]
    if any(reasons):
        report.notes.append(f"no run on scaled weights: {next(filter(None, reasons))}")
        return
    for change in CHANGES:
        with ExitStack() as stack:
            copies = [stack.enter_context(scaled_graph(file.path, file.contents, tensors, change)) for file in files]
            if graphs := _opened(verified, add, copies):
                _compare(eager.twin(change), graphs, report, add, change, verified.named)
