"""verify: runs the scenarios on the eager model and on every graph of a folder, and compares all outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from llmconv.argument_checks import checked, require_least
from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.paths import Written
from llmconv.files.sources import fetches
from llmconv.memory import reporting_out_of_memory
from llmconv.output.manifest import MANIFEST
from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry, graph_entries
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.runner import SessionSettings
from llmconv.verify.audit.decisions.audit import audit_decisions, read_config
from llmconv.verify.audit.file_checksums import audit_graph_files
from llmconv.verify.audit.inputs import require_folder, require_model, require_weights
from llmconv.verify.audit.odd_weights import odd_weights
from llmconv.verify.audit.stages_as_one import load_whole
from llmconv.verify.audit.weights import Source, audit_files, audit_weights
from llmconv.verify.bisect.first_difference import localise
from llmconv.verify.bisect.replay import Folder
from llmconv.verify.comparison.embeddings import takes_embeddings
from llmconv.verify.comparison.layer_by_layer import StreamedEager, why_not_layered
from llmconv.verify.comparison.run import Comparison, open_graphs
from llmconv.verify.other_exporters.quantized.kinds import quantized_operators
from llmconv.verify.reference.cost_estimate import Forecast, choose, distinct_files
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Report
from llmconv.verify.session import OnChecks, collector, look_closer, new_piece, new_report, require_suite

PATH_LIMIT = 4096
"""Characters of a path (`PATH_MAX`)."""


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
    low_memory: bool | None = None,
    allow_changed: bool = False,
) -> Report:
    """Compares every graph of a folder with the eager model: every output, every scenario.

    Args:
        folder: what `llmconv export` left.
        reference: the Hugging Face folder of the model; as the manifest says, or `folder` itself, when left out.
        suite, only: `quick` or `full`; or names of scenarios, which alone are run.
        repeat: how often every call is run; all runs have to give the same bits.
        settings: of onnxruntime.
        on_checks: called with the checks as they come.
        eager: the reference, opened before, of this model; what it computed is used again.
        trust_remote_code: run the reference's own code, which `auto_map` of its `config.json` names.
        bisect: after a failure, look for the first node that differs.
        minimize: a new folder for the smallest piece that fails; looks for the node, too.
        low_memory: hold neither the model nor a graph whole (`verify.comparison.layer_by_layer`); None where
            the whole model does not fit into memory.
        allow_changed: a graph that is not the one that was exported is a note and no failure.

    Raises:
        InputRefused: the folder or the reference cannot be used, a graph refers to what it must not, or memory does
            not suffice.
        OutOfMemory: memory ran out on the way.
        UsageProblem: an unknown suite, or a folder for the smallest failing piece that holds something.
    """
    require_suite(suite)
    require_least(repeat, 1, "repeat")
    folder, piece, settings = require_folder(folder), new_piece(minimize), settings or SessionSettings()
    report = new_report(folder.name, suite, only, repeat, settings)
    if not (entries := graph_entries(folder)):
        report.notes.append(f"no graphs in `{require_model(folder)}`; make them with `llmconv export {folder}`")
        return report
    truth_folder = require_weights(folder, entries[0], reference or recorded_reference(folder))
    report.reference = truth_folder.name
    verified = Folder(folder, entries, _models(folder, entries), settings)
    add = collector(report, on_checks)
    with reporting_out_of_memory(f"while `{folder.name}` was verified"):
        layered = low_memory
        if eager is None:
            layered = _layered(verified, truth_folder, report, low_memory, searches=bool(bisect or piece or repeat > 1))
        _audit(verified, truth_folder, report, add, allow_changed=allow_changed)
        eager = _compare(verified, truth_folder, report, add, eager, trusted=trust_remote_code, low_memory=layered)
        report.where = localise(report.checks)
        look_closer(report, verified, eager, piece, bisect=bisect)
    return report


def _layered(verified: Folder, reference: Path, report: Report, asked: bool | None, *, searches: bool) -> bool:
    """Whether to go layer by layer, where the whole model does not fit; said in a note."""
    paths = [path for entry in verified.entries for path in entry.paths(verified.path)]
    why_not = why_not_layered(verified.entries, verified.models)
    if searches:
        why_not = "`--repeat`, `--bisect` and `--minimize` hold the whole model"
    layered, note = choose(Forecast.of(reference, distinct_files(paths)), asked, why_not)
    report.notes += [note] if note else []
    return layered


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
    low_memory: bool | None,
) -> Eager | None:
    """All scenarios; returns the reference that they were compared with, if any graph could be run."""
    graphs = open_graphs(verified.path, verified.entries, verified.settings, add, low_memory=bool(low_memory))
    if not graphs:
        return eager
    dtype, code = graphs[0].dtype.name, reference if trusted else None
    if low_memory:
        eager = StreamedEager(reference, dtype, code=code, suite=report.suite, only=tuple(report.settings["seeds"]))
    eager = eager.in_dtype(dtype) if eager else Eager(reference, dtype, code=code)
    Comparison(eager, verified.path, verified.models, verified.settings, report, add).run(graphs)
    return eager


def _require_floats(folder: Path, models: dict[str, onnx.ModelProto]) -> None:
    """Refuses graphs that somebody quantised in place: they are asked other questions."""
    for name, model in models.items():
        if operators := quantized_operators(model):
            raise InputRefused(
                f"`{name}` has quantised weights ({operators[0]})",
                hint=f"give it as `--graph {folder / name} --reference HF_FOLDER`, for each graph of the folder",
            )


def recorded_reference(folder: Path) -> Path:
    """The model folder that the manifest names, or `folder` itself.

    Raises:
        InputRefused: the manifest names a folder that is not there.
    """
    name = read_json(folder / MANIFEST).get("reference") if (folder / MANIFEST).is_file() else None
    if name is not None and (not isinstance(name, str) or "\0" in name or len(name) > PATH_LIMIT):
        raise MalformedInput(f"`reference` in `{MANIFEST}` is not a path", hint="give `--reference HF_FOLDER`")
    path = folder / name if name else folder
    if not (path / "config.json").is_file():
        raise InputRefused(f"the model folder `{path}` has no config.json", hint="give `--reference HF_FOLDER`")
    return path


def _prefix(verified: Folder, graph: str) -> int:
    """Virtual tokens that a graph begins with, as the manifest has it."""
    entries = [entry for entry in verified.entries if graph in entry.files and entry.prefix]
    return entries[0].prefix.length if entries and entries[0].prefix else 0


def _audit(verified: Folder, reference: Path, report: Report, add: OnChecks, *, allow_changed: bool) -> None:
    """Files as the manifest has them, every initializer, and what is odd about the weights."""
    found = audit_graph_files(verified.path, verified.entries, verified.models, allow_changed=allow_changed)
    add(found[0])
    report.notes += found[1]
    report.unseen += ["graphs that are not the folder's own"] if any(c.verdict == "skip" for c in found[0]) else []
    prefixes = [entry.prefix.file for entry in verified.entries if entry.prefix]
    source = Source.of(verified.path, reference, prefixes)
    add(audit_files(verified.path))
    report.notes += odd_weights(source.reference)
    used, config = set[str](), read_config(reference)
    for name, model in verified.models.items():
        check, names = audit_weights(name, model, source)
        used |= names
        add([check])
    add(
        [
            audit_decisions(name, model, config, prefix=_prefix(verified, name))
            for name, model in verified.models.items()
        ]
    )
    unused = sorted(set(source.reference) - used)
    if used and unused:
        report.notes.append(f"{len(unused)} tensors of the model are in no graph, first `{unused[0]}`")
