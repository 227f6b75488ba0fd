"""`verify`: runs the scenarios on the eager model and on every graph of a folder, and compares all outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import onnx

from llmconv.argument_checks import checked
from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.files.paths import Written, is_address
from llmconv.files.sources import fetches
from llmconv.output.manifest import MANIFEST, read_manifest
from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS
from llmconv.runtime.onnxruntime.float32_graph import half_precision
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry, graph_entries
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.session_settings import CPU, SessionSettings, provider_name
from llmconv.verify.arguments import require_folder, require_model, require_weights
from llmconv.verify.audit.decisions.audit import audit_decisions, read_config
from llmconv.verify.audit.file_checksums import audit_graph_files
from llmconv.verify.audit.odd_weights import odd_weights
from llmconv.verify.audit.stages_as_one import load_whole
from llmconv.verify.audit.weights import WeightSource, audit_files, audit_weights
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.cache_copies import has_codes
from llmconv.verify.comparison.embeddings import takes_embeddings
from llmconv.verify.comparison.half_precision import most_precise
from llmconv.verify.comparison.layer_by_layer import why_not_layered
from llmconv.verify.folder_comparison import Compared, compare_half_precision
from llmconv.verify.other_exporters.quantized.accuracy_gates import AccuracyLimits
from llmconv.verify.other_exporters.quantized.activation_ranges import rounds_activations
from llmconv.verify.other_exporters.quantized.expected_codes import ExpectedCodes
from llmconv.verify.other_exporters.quantized.smoothing import StoredSmoothing
from llmconv.verify.other_exporters.run import require_limits
from llmconv.verify.other_exporters.verdicts.quantized import QuantizationOptions
from llmconv.verify.quantized_cache import CodedFolder
from llmconv.verify.quantized_folder import compare_quantized_folder, is_quantized
from llmconv.verify.recorded_text import recorded_text
from llmconv.verify.recorded_verdict import recording
from llmconv.verify.reference.cost_estimate import CostEstimate, choose, distinct_files
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Checks, Report
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.verification import Checking, OnChecks, Session

CODES = "quantized*.safetensors"
"""Weight files of `llmconv export --quant`."""

PATH_LIMIT = 4096
"""Maximum length of a path in characters (`PATH_MAX`)."""


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
    text: str | Path | None = None,
    max_divergence: float | None = None,
    min_agreement: float | None = None,
    calibrate: str | Path | None = None,
    record: bool = True,
) -> Report:
    """Compares every output of every graph in a folder with the eager model.

    Args:
        folder: a folder that `llmconv export` wrote.
        reference: the Hugging Face model folder (default: as recorded in the manifest, else `folder`).
        suite: which set of scenarios to run, `quick` or `full`.
        only: names of scenarios; if given, only these are run.
        repeat: number of runs of each call; all must give the same bits.
        settings: of onnxruntime.
        on_checks: called with each list of checks when it is made.
        eager: an open reference of this model, whose results are reused.
        trust_remote_code: run the code that `auto_map` in the reference's `config.json` names.
        bisect: after a failure, search for the first node that differs.
        minimize: a new folder for the smallest failing piece; implies the search.
        low_memory: hold one layer at a time (`verify.comparison.layer_by_layer`); None to decide by free memory.
        allow_changed: a graph that was changed after its export is a note instead of a failure.
        text: text file on which the accuracy of quantized weights is measured; default: a text that ships with llmconv.
        max_divergence: maximum mean divergence of quantized weights, in nats per token (default: by preset).
        min_agreement: minimum share of tokens with the same most likely next token.
        calibrate: the text file on which `export` measured the ranges of an int8 cache or of activations.
        record: record the verdict in the manifest of `folder`, if it has one and is not an address; False to leave the
            folder as it is.

    Raises:
        InputRefused: the folder or reference cannot be used, a graph refers to other folders, or memory is too small.
        OutOfMemory: memory ran out during the run.
        UsageProblem: an unknown suite or scenario, quantized weights without `reference`, or the folder for the
            smallest failing piece is not empty.
    """
    require_limits(max_divergence=max_divergence, min_agreement=min_agreement)
    session = Session.of(Selection(suite, only, repeat), settings, on_checks, bisect=bisect, minimize=minimize)
    record = record and not is_address(folder)  # a download is removed by the end
    folder = require_folder(folder)
    report = session.new_report(folder.name)
    if not (entries := graph_entries(folder)):
        report.notes.append(f"no graphs in `{require_model(folder)}`; make them with `llmconv export {folder}`")
        return report
    reference = require_weights(folder, entries[0], reference or recorded_reference(folder))
    report.reference = reference.name
    verified = VerifiedFolder(folder, entries, _models(folder, entries), session.settings)
    calibrated = Path(calibrate) if calibrate else None
    code = reference if trust_remote_code else None
    cost = _cost_options(verified, text, AccuracyLimits(max_divergence, min_agreement), calibrated, code)
    coded = CodedFolder.of(verified, calibrated, cost, prepack=is_quantized(verified.models))
    if coded and low_memory:
        raise UsageProblem("`--low-memory` compares graphs of floats only", hint="leave out `--low-memory`")
    with ExitStack() as stack:
        if record:
            stack.enter_context(recording(verified, reference, report, only))
        rest = report, session, eager
        checks = (
            _coded_checks(coded, reference, *rest, stack, allow_changed=allow_changed)
            if coded
            else _checks(verified, reference, *rest, cost, low_memory, allow_changed=allow_changed)
        )
        return session.run(report, checks, most_precise)


def _coded_checks(
    coded: CodedFolder,
    reference: Path,
    report: Report,
    session: Session,
    eager: Eager | None,
    stack: ExitStack,
    *,
    allow_changed: bool,
) -> Checking:
    """All checks of graphs with codes in their caches; `stack` keeps copies, other arguments as in `_checks`."""
    verified, cost = coded.verified, coded.cost
    structure = coded.structure()
    yield structure
    if any(check.verdict == "fail" for check in structure):
        return eager, verified
    copies = coded.as_floats(stack)
    model: Eager | None
    if coded.prepack:
        yield from _audit_files(verified, report, allow_changed=allow_changed)
        result = yield from compare_quantized_folder(copies, reference, report, session, eager, cost)
        model = eager or Eager(reference, "float32", code=cost.code)
    else:
        result = yield from _checks(copies, reference, report, session, eager, cost, False, allow_changed=allow_changed)
        model = result[0]
    if model is not None:
        yield from coded.compare(model, report, session)
    return result


def _checks(
    verified: VerifiedFolder,
    reference: Path,
    report: Report,
    session: Session,
    eager: Eager | None,
    cost: QuantizationOptions,
    low_memory: bool | None,
    *,
    allow_changed: bool,
) -> Checking:
    """All checks of a folder: audits of its files, then all scenarios; arguments as in `verify`.

    Args:
        cost: options for quantized graphs, and the reference's folder where its own code is trusted.
    """
    if is_quantized(verified.models):
        if low_memory:
            raise UsageProblem("`--low-memory` compares graphs of floats only", hint="leave out `--low-memory`")
        yield from _audit_files(verified, report, allow_changed=allow_changed)
        return (yield from compare_quantized_folder(verified, reference, report, session, eager, cost))
    if eager is None:
        low_memory = _is_layered(verified, reference, report, session, low_memory)
    yield from _audit(verified, reference, report, allow_changed=allow_changed)
    compared = Compared(verified, reference, report, session.selection, cost.code, layered=bool(low_memory))
    if half := half_precision(next(iter(verified.models.values()))):
        return (yield from compare_half_precision(compared, half, eager))
    return (yield from compared.run(eager))


def _is_layered(
    verified: VerifiedFolder, reference: Path, report: Report, session: Session, wanted: bool | None
) -> bool:
    """Whether to go layer by layer because the whole model does not fit; a note in the report states it."""
    paths = [path for entry in verified.entries for path in entry.paths(verified.path)]
    why_not = why_not_layered(verified.entries, verified.models)
    if provider_name(session.settings.provider) != CPU:
        why_not = "`--provider` holds the whole model"
        if wanted:
            raise UsageProblem("`--low-memory` runs on the CPU", hint="leave out `--low-memory` or `--provider`")
    if session.bisect or session.minimized or session.selection.repeat > 1:
        why_not = "`--repeat`, `--bisect` and `--minimize` hold the whole model"
    layered, note = choose(CostEstimate.of(reference, distinct_files(paths)), wanted, why_not)
    report.notes += [note] if note else []
    return layered


def _models(folder: Path, entries: Sequence[GraphEntry]) -> dict[str, onnx.ModelProto]:
    """The graphs without their weights, by name, with the embedding table if they take embeddings."""
    models = {entry.name: load_whole(folder, entry) for entry in entries}
    if takes_embeddings(models.values()):
        models[EMBEDDINGS] = load_guarded(folder / EMBEDDINGS)
    return models


def recorded_reference(folder: Path) -> Path:
    """The model folder that the manifest names, else `folder`.

    Raises:
        InputRefused: the folder that the manifest names does not exist.
        UsageProblem: it names none, and the weights in `folder` are quantized.
    """
    name = read_json(folder / MANIFEST).get("reference") if (folder / MANIFEST).is_file() else None
    if name is not None and (not isinstance(name, str) or "\0" in name or len(name) > PATH_LIMIT):
        raise MalformedInput(f"`reference` in `{MANIFEST}` is not a path", hint="give `--reference HF_FOLDER`")
    if name is None and any(folder.glob(CODES)):
        raise UsageProblem(
            f"the weights in `{folder}` are quantized, and are compared with the model before that",
            hint="give `--reference MODEL`, the folder that was exported",
        )
    path = folder / name if name else folder
    if not (path / "config.json").is_file():
        raise InputRefused(f"the model folder `{path}` has no config.json", hint="give `--reference HF_FOLDER`")
    return path


def _prefix(verified: VerifiedFolder, graph: str) -> int:
    """Number of virtual tokens before a graph's input, as recorded in the manifest."""
    entries = [entry for entry in verified.entries if graph == entry.name and entry.prefix]
    return entries[0].prefix.length if entries and entries[0].prefix else 0


def _audit(verified: VerifiedFolder, reference: Path, report: Report, *, allow_changed: bool) -> Checks:
    """Checks that run no graph: the recorded files, every initializer, and the decisions in the graphs."""
    yield from _audit_files(verified, report, allow_changed=allow_changed)
    prefixes = [entry.prefix.file for entry in verified.entries if entry.prefix]
    source = WeightSource.of(verified.path, reference, prefixes)
    report.notes += odd_weights(source.reference)
    used, config = set[str](), read_config(reference)
    for name, model in verified.models.items():
        check, names = audit_weights(name, model, source)
        used |= names
        yield [check]
    models = verified.models.items()
    yield [audit_decisions(name, model, config, prefix=_prefix(verified, name)) for name, model in models]
    unused = sorted(set(source.reference) - used)
    if used and unused:
        report.notes.append(f"{len(unused)} tensors of the model are in no graph, first `{unused[0]}`")


def _audit_files(verified: VerifiedFolder, report: Report, *, allow_changed: bool) -> Checks:
    """Checks of the recorded files."""
    checks, notes = audit_graph_files(verified.path, verified.entries, verified.models, allow_changed=allow_changed)
    yield checks
    report.notes += notes
    report.unseen += ["graphs that are not the folder's own"] if any(c.verdict == "skip" for c in checks) else []
    yield audit_files(verified.path)


def _cost_options(
    verified: VerifiedFolder,
    text: str | Path | None,
    limits: AccuracyLimits,
    calibrated: Path | None,
    code: Path | None,
) -> QuantizationOptions:
    """The options for quantized graphs; graphs of floats take none."""
    quantized = is_quantized(verified.models) or any(map(has_codes, verified.models.values()))
    if not quantized and (text is not None or limits.given):
        raise UsageProblem(
            "`--text`, `--max-divergence` and `--min-agreement` apply to quantized weights and caches only",
            hint="leave them out",
        )
    ranges = (
        recorded_text(verified.path, calibrated) if any(map(rounds_activations, verified.models.values())) else None
    )
    preset = recorded(verified.path, "quant")
    own = bool(preset) or any(verified.path.glob(CODES))
    smoothing = StoredSmoothing.of(verified.path)
    method, weighted = recorded(verified.path, "method"), bool(recorded(verified.path, "calibrate"))
    codes = ExpectedCodes(nearest=own, plain=method == "rtn", weighted=weighted, feedback=method == "gptq")
    file = Path(text) if text else None
    return QuantizationOptions(file, limits, preset, code, codes, smoothing, ranges, own=True)


def recorded(folder: Path, option: str) -> str:
    """The latest value of an option in the folder's manifest; empty without one.

    `quant` is that of `--quant`, or the method of a model that was quantized before.
    """
    options = [step.get("options") for step in read_manifest(folder).steps]
    values = [found.get(option) for found in options if isinstance(found, dict)]
    return next((value for value in reversed(values) if isinstance(value, str)), "")
