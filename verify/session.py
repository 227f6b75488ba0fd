"""verify: runs the scenarios on the eager model and on every graph of a folder, and compares all outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from llmconv import __version__
from llmconv.calls import checked, require_least
from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, UsageProblem
from llmconv.manifest import MANIFEST, file_entry, read_manifest
from llmconv.paths import Written
from llmconv.runtime.embeddings import EMBEDDINGS
from llmconv.runtime.graph_entry import GraphEntry, graph_entries
from llmconv.runtime.guard import load_guarded
from llmconv.runtime.ort import SessionSettings
from llmconv.storage import fetches, local_path
from llmconv.verify.bisect import name_node
from llmconv.verify.compare import GATES
from llmconv.verify.comparison import Comparison, open_graphs, paths_of
from llmconv.verify.embeddings import takes_embeddings
from llmconv.verify.foreign.quantized.kinds import quantized_operators
from llmconv.verify.localise import localise
from llmconv.verify.low_memory import StreamedEager
from llmconv.verify.minimize import require_new
from llmconv.verify.odd_weights import odd_weights
from llmconv.verify.replay import Folder
from llmconv.verify.report import Check, Report
from llmconv.verify.scenarios import Scenario, chosen
from llmconv.verify.truth import Eager
from llmconv.verify.weights import Source, audit_files, audit_weights
from llmconv.verify.whole import load_whole

OnChecks = Callable[[list[Check]], None]
LIBRARIES = ("numpy", "onnx", "onnxruntime", "torch", "transformers")


@fetches
@checked
def verify(  # noqa: PLR0913 - one parameter per option of the command
    folder: str | Path,
    *,
    reference: str | Path | None = None,
    suite: str = "quick",
    only: Sequence[str] = (),
    repeat: int = 1,
    settings: SessionSettings | None = None,
    on_checks: OnChecks | None = None,
    eager: Eager | None = None,
    trust_remote_code: bool = False,
    bisect: bool = False,
    minimize: Written | None = None,
    low_memory: bool = False,
) -> Report:
    """Compares every graph of a folder with the eager model: every output, every scenario.

    Args:
        folder: what `llmconv export` left.
        reference: the Hugging Face folder of the model; as the manifest says, or `folder` itself, when left out.
        suite, only: `quick` or `full`; or names of scenarios, which alone are run.
        repeat: how often every call is run; all runs have to give the same bits.
        settings: of onnxruntime.
        on_checks: called with the checks as they come.
        eager: the reference, opened before; what it computed is used again.
        trust_remote_code: run the reference's own code, which `auto_map` of its `config.json` names.
        bisect: after a failure, look for the first node that differs.
        minimize: a new folder for the smallest piece that fails; looks for the node, too.
        low_memory: hold neither the model nor a graph's weights, see `llmconv.verify.low_memory`.

    Raises:
        InputRefused: the folder or the reference cannot be used, or a graph refers to what it must not.
        UsageProblem: an unknown suite, or a folder for the smallest failing piece that holds something.
    """
    folder, piece, settings = local_path(folder), new_piece(minimize), settings or SessionSettings()
    require_least(repeat, 1, "repeat")
    _require_usable(folder, suite)
    report = new_report(folder.name, suite, only, repeat, settings)
    if not (entries := graph_entries(folder)):
        report.notes.append(f"no graphs in `{folder}`; make them with `llmconv export {folder}`")
        return report
    truth_folder = local_path(reference) if reference else recorded_reference(folder)
    report.reference = truth_folder.name
    verified = Folder(folder, entries, _models(folder, entries), settings)
    add = collector(report, on_checks)
    _audit(verified, truth_folder, report, add)
    eager = _compare(verified, truth_folder, report, add, eager, trusted=trust_remote_code, low_memory=low_memory)
    report.where = localise(report.checks)
    if bisect or piece:
        name_node(report, verified, eager, piece)
    return report


def new_piece(minimize: str | Path | None) -> Path | None:
    """The folder for the smallest piece that fails; refused with UsageProblem where it holds something."""
    piece = Path(minimize) if minimize else None
    if piece:
        require_new(piece)
    return piece


def new_report(name: str, suite: str, only: Sequence[str], repeat: int, settings: SessionSettings) -> Report:
    """A report without checks, which says what would have to be the same for the same report."""
    said = recorded(settings, chosen(suite, only), repeat)
    return Report(name, name, suite, versions=library_versions(), settings=said)


def _models(folder: Path, entries: Sequence[GraphEntry]) -> dict[str, onnx.ModelProto]:
    """The graphs without their weights, by name; the embedding table too, where they take embeddings."""
    models = {entry.name: load_whole(folder, entry) for entry in entries}
    _require_floats(folder, models)
    if takes_embeddings(models.values()):
        models[EMBEDDINGS] = load_guarded(folder / EMBEDDINGS)
    return models


def _compare(
    verified: Folder,
    reference: Path,
    report: Report,
    add: OnChecks,
    eager: Eager | None,
    *,
    trusted: bool,
    low_memory: bool,
) -> Eager | None:
    """All scenarios; returns the reference that they were compared with, if any graph could be run."""
    graphs = open_graphs(verified.path, verified.entries, verified.settings, add, low_memory=low_memory)
    if not graphs:
        return eager
    dtype, code = graphs[0].dtype.name, reference if trusted else None
    if low_memory:
        eager = StreamedEager(reference, dtype, code=code, suite=report.suite, only=tuple(report.settings["seeds"]))
    eager = eager or Eager(reference, dtype, code=code)
    Comparison(eager, verified.path, verified.models, verified.settings, report, add).run(graphs)
    return eager


def recorded(settings: SessionSettings, rows: Sequence[Scenario], repeat: int) -> dict[str, Any]:
    """What would have to be the same for the same report."""
    return {
        "threads": settings.threads,
        "optimization": settings.optimization,
        "repeat": repeat,
        "gates": {dtype: asdict(gate) for dtype, gate in GATES.items()},
        "seeds": {scenario.name: scenario.seed for scenario in rows},
    }


def collector(report: Report, on_checks: OnChecks | None) -> OnChecks:
    """What takes new checks: they join the report, and `on_checks` is told."""

    def add(checks: list[Check]) -> None:
        report.checks += checks
        if on_checks:
            on_checks(checks)

    return add


def _require_usable(folder: Path, suite: str) -> None:
    require_suite(suite)
    if not folder.is_dir():
        raise InputRefused(f"`{folder}` is no folder", hint="give the folder that `llmconv export` wrote to")


def _require_floats(folder: Path, models: dict[str, onnx.ModelProto]) -> None:
    """Refuses graphs that somebody quantised in place: they are asked other questions."""
    for name, model in models.items():
        if operators := quantized_operators(model):
            raise InputRefused(
                f"`{name}` has quantised weights ({operators[0]})",
                hint=f"give it as `--graph {folder / name} --reference HF_FOLDER`, for each graph of the folder",
            )


def require_suite(suite: str) -> None:
    """Refuses an unknown suite with UsageProblem."""
    if suite not in {"quick", "full"}:
        raise UsageProblem(f"suite `{suite}` is unknown", hint="give `quick` or `full`")


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


def _audit(verified: Folder, reference: Path, report: Report, add: OnChecks) -> None:
    """Files as the manifest has them, every initializer, and what is odd about the weights."""
    report.notes += changed_graphs(verified.path, paths_of(verified.path, verified.entries, verified.models))
    prefixes = [entry.prefix.file for entry in verified.entries if entry.prefix]
    source = Source.of(verified.path, reference, prefixes)
    add(audit_files(verified.path))
    report.notes += odd_weights(source.reference)
    used: set[str] = set()
    for name, model in verified.models.items():
        check, names = audit_weights(name, model, source)
        used |= names
        add([check])
    unused = sorted(set(source.reference) - used)
    if used and unused:
        report.notes.append(f"{len(unused)} tensors of the model are in no graph, first `{unused[0]}`")
