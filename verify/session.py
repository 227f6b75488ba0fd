"""verify: runs the scenarios on the eager model and on every graph of a folder, and compares all outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import onnx

from llmconv import __version__
from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, LlmconvError, UsageProblem
from llmconv.manifest import MANIFEST, file_entry, read_manifest
from llmconv.runtime.embeddings import EMBEDDINGS
from llmconv.runtime.graph_entry import GraphEntry, graph_entries
from llmconv.runtime.guard import load_guarded
from llmconv.runtime.ort import OrtGraph, OrtRunner, SessionSettings, open_graph
from llmconv.verify.bisect import name_node
from llmconv.verify.candidate import Agreement, Candidate, candidates, check_scenario
from llmconv.verify.compare import GATES
from llmconv.verify.embeddings import check_embeddings, takes_embeddings
from llmconv.verify.localise import localise
from llmconv.verify.minimize import require_new
from llmconv.verify.prefix import stored_start, trained_start
from llmconv.verify.replay import Folder
from llmconv.verify.report import Check, Report
from llmconv.verify.scenarios import scenarios
from llmconv.verify.structure import check_structure, name_problems
from llmconv.verify.truth import Eager
from llmconv.verify.twin import CHANGES, Change, scaled_copy, why_no_twin
from llmconv.verify.twin import SCENARIOS as TWIN_SCENARIOS
from llmconv.verify.weights import Source, audit_files, audit_weights
from llmconv.verify.whole import load_whole

LIBRARIES = ("numpy", "onnx", "onnxruntime", "torch", "transformers")


def verify(  # noqa: PLR0913 - the options of the command, by the same names
    folder: str | Path,
    *,
    reference: str | Path | None = None,
    suite: str = "quick",
    settings: SessionSettings | None = None,
    on_checks: Callable[[list[Check]], None] | None = None,
    eager: Eager | None = None,
    trust_remote_code: bool = False,
    bisect: bool = False,
    minimize: str | Path | None = None,
) -> Report:
    """Compares every graph of a folder with the eager model: every output, every scenario.

    Args:
        folder: what `llmconv export` left.
        reference: the Hugging Face folder of the model; as the manifest says, or `folder` itself, when left out.
        suite: `quick` or `full`.
        settings: of onnxruntime.
        on_checks: called with the checks as they come.
        eager: the reference, opened before; what it computed is used again.
        trust_remote_code: run the reference's own code, which `auto_map` of its `config.json` names.
        bisect: after a failure, look for the first node that differs.
        minimize: a new folder for the smallest piece that is wrong; then `bisect` is implied.

    Raises:
        InputRefused: the folder or the reference cannot be used, or a graph refers to what it must not.
        UsageProblem: an unknown suite, or a folder for the smallest failing piece that holds something.
    """
    folder = Path(folder)
    _require_usable(folder, suite)
    piece = Path(minimize) if minimize else None
    if piece:
        require_new(piece)
    report = Report(folder.name, folder.name, suite, versions=library_versions())
    entries = graph_entries(folder)
    if not entries:
        report.notes.append(f"no graphs in `{folder}`; make them with `llmconv export {folder}`")
        return report
    models = {entry.name: load_whole(folder, entry) for entry in entries}
    if takes_embeddings(models.values()):
        models[EMBEDDINGS] = load_guarded(folder / EMBEDDINGS)
    truth_folder = Path(reference or recorded_reference(folder))
    report.reference = truth_folder.name

    add = _collector(report, on_checks)
    report.notes += changed_graphs(folder, _paths(folder, entries, models))
    source = Source.of(folder, truth_folder, [entry.prefix.file for entry in entries if entry.prefix])
    add(audit_files(folder))
    _audit(models, source, report, add)
    graphs = _open(folder, entries, settings, add)
    if graphs:
        code = truth_folder if trust_remote_code else None
        eager = eager or Eager(truth_folder, graphs[0].dtype.name, code=code)
        _run(eager, folder, graphs, models, settings, report, add)
    report.where = localise(report.checks)
    if bisect or piece:
        name_node(report, Folder(folder, entries, models, settings or SessionSettings(), suite), eager, piece)
    return report


def _collector(report: Report, on_checks: Callable[[list[Check]], None] | None) -> Callable[[list[Check]], None]:
    def add(checks: list[Check]) -> None:
        report.checks += checks
        if on_checks:
            on_checks(checks)

    return add


def _require_usable(folder: Path, suite: str) -> None:
    if suite not in {"quick", "full"}:
        raise UsageProblem(f"suite `{suite}` is unknown", hint="give `quick` or `full`")
    if not folder.is_dir():
        raise InputRefused(f"`{folder}` is no folder", hint="give the folder that `llmconv export` wrote to")


def recorded_reference(folder: Path) -> Path:
    """The model folder that the manifest names, or `folder` itself.

    Raises:
        InputRefused: the manifest names a folder that is not there.
    """
    name = read_json(folder / MANIFEST).get("reference") if (folder / MANIFEST).is_file() else None
    path = folder / str(name) if name else folder
    if not (path / "config.json").is_file():
        raise InputRefused(f"the model folder `{path}` has no config.json", hint="give `--reference HF_FOLDER`")
    return path


def _paths(folder: Path, entries: Iterable[GraphEntry], models: Mapping[str, onnx.ModelProto]) -> list[Path]:
    """All graph files."""
    table = [folder / EMBEDDINGS] if EMBEDDINGS in models else []
    return [*(path for entry in entries for path in entry.paths(folder)), *table]


def changed_graphs(folder: Path, paths: Iterable[Path]) -> list[str]:
    """A note for every graph that is not the one that the manifest describes."""
    recorded = read_manifest(folder).files
    notes = []
    for path in paths:
        expected = recorded.get(path.name, {}).get("sha256")
        if expected and expected != file_entry(path.read_bytes())["sha256"]:
            notes.append(f"`{path.name}` has changed since the manifest was written")
    return notes


def library_versions() -> dict[str, str]:
    """Versions of what takes part in the verdict."""
    return {"llmconv": __version__, **{name: version(name) for name in LIBRARIES}}


def _audit(
    models: dict[str, onnx.ModelProto], source: Source, report: Report, add: Callable[[list[Check]], None]
) -> None:
    used: set[str] = set()
    for name, model in models.items():
        check, names = audit_weights(name, model, source)
        used |= names
        add([check])
    unused = sorted(set(source.reference) - used)
    if used and unused:
        report.notes.append(f"{len(unused)} tensors of the model are in no graph, first `{unused[0]}`")


def _open(
    folder: Path,
    entries: Iterable[GraphEntry],
    settings: SessionSettings | None,
    add: Callable[[list[Check]], None],
) -> list[OrtGraph]:
    """The graphs that onnxruntime can open; the others are failed checks."""
    graphs = []
    for entry in entries:
        try:
            graphs.append(open_graph(folder, entry, replace(settings or SessionSettings(), garbage=True)))
        except LlmconvError as error:
            add([Check("structure", entry.name, "", verdict="fail", detail=error.message)])
    return graphs


def _run(
    eager: Eager,
    folder: Path,
    graphs: list[OrtGraph],
    models: dict[str, onnx.ModelProto],
    settings: SessionSettings | None,
    report: Report,
    add: Callable[[list[Check]], None],
) -> None:
    """Everything that takes the eager model; graphs of another signature are not run."""
    if EMBEDDINGS in models:
        add([check_embeddings(folder / EMBEDDINGS, eager, settings)])
    shapes = eager.cache_shapes()
    add([check_structure(graph, models[graph.name], shapes) for graph in graphs])
    graphs = [graph for graph in graphs if not name_problems(graph, shapes)]
    _compare(eager, folder, graphs, report, add)
    _compare_twins(eager, folder, graphs, models, settings, report, add)


def _compare(
    eager: Eager,
    folder: Path,
    graphs: list[OrtGraph],
    report: Report,
    add: Callable[[list[Check]], None],
) -> None:
    """All scenarios on all graphs, each against the model behind the graph's own prefix."""
    gates = GATES[eager.dtype]
    pair = Agreement(gates)
    for prefix in dict.fromkeys(graph.entry.prefix for graph in graphs):
        truth = eager.behind(prefix, trained_start(folder, prefix)) if prefix else eager
        for scenario, chains in scenarios(report.suite, truth.facts()):
            found = [candidate for candidate in candidates(graphs, chains) if candidate.prefix == prefix]
            truths = truth.truths(scenario, chains) if found else []
            for candidate in found:
                add(check_scenario(scenario, chains, candidate, truths, gates, pair))
    add(pair.checks())


def _compare_twins(
    eager: Eager,
    folder: Path,
    originals: list[OrtGraph],
    models: dict[str, onnx.ModelProto],
    settings: SessionSettings | None,
    report: Report,
    add: Callable[[list[Check]], None],
) -> None:
    """A few scenarios on scaled weights."""
    if not originals:
        return
    entries = [graph.entry for graph in originals]
    paths = _paths(folder, entries, models)
    reason = why_no_twin(folder, eager.folder, [models[entry.name] for entry in entries], report.suite)
    if reason:
        report.notes.append(f"no run on scaled weights: {reason}")
        return
    for change in CHANGES:
        twin = eager.twin(change)
        with scaled_copy(folder, paths, change) as copy:
            graphs = _open(copy, entries, settings, add)
            for prefix in dict.fromkeys(graph.entry.prefix for graph in graphs):
                truth = twin
                if prefix:  # which stays what it is
                    truth = twin.behind(prefix, stored_start(folder, prefix, len(eager.cache_shapes()) // 2))
                _compare_twin(truth, change, [graph for graph in graphs if graph.entry.prefix == prefix], report, add)


def _compare_twin(
    twin: Eager, change: Change, graphs: list[OrtGraph], report: Report, add: Callable[[list[Check]], None]
) -> None:
    """Graphs on weights of which some are scaled, and the eager model on the same."""
    gates = GATES[twin.dtype]
    for scenario, chains in scenarios(report.suite, twin.facts()):
        if scenario.name in TWIN_SCENARIOS:
            named = replace(scenario, name=f"{scenario.name}, {change.name}", bug=change.bug)
            truths = twin.truths(named, chains)
            for graph in graphs:
                candidate = Candidate(graph.name, OrtRunner(graph, graph), (graph,))
                add(check_scenario(named, chains, candidate, truths, gates, Agreement(gates)))
