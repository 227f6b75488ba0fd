"""`verify`: runs the scenarios on the eager model and on every graph of a folder, and compares all outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx

from llmconv.argument_checks import checked
from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.files.paths import Written
from llmconv.files.sources import fetches, is_remote
from llmconv.output.manifest import MANIFEST, read_manifest
from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry, graph_entries, single_pass_entries
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.vision import VISION, has_vision
from llmconv.verify.adapted_folder import adapted, unseen_factors
from llmconv.verify.arguments import require_folder, require_model, require_weights
from llmconv.verify.audit.stages_as_one import load_whole
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.cache_copies import has_codes
from llmconv.verify.comparison.embeddings import takes_embeddings
from llmconv.verify.comparison.half_precision import most_precise
from llmconv.verify.float_folder import FloatFolder
from llmconv.verify.folder_audits import audit_recorded_files
from llmconv.verify.method import AUTO, Method
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
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import WHOLE, Report
from llmconv.verify.scenarios.budget import Budget
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.single_pass.comparison import SinglePassFolder
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
    method: str = AUTO,
    layers: str | None = None,
    record: bool = True,
    budget: float | None = None,
    adapter: str | Path | None = None,
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
        method: `whole`, `induction` over layers, `structure` without numbers, or `auto` to choose by the model's size.
        layers: of an induction, the layers that run by themselves: `all` (default), `sampled:K` or `classes`.
        record: record the verdict in the manifest of `folder`, if it has one and is not an address; False to leave the
            folder as it is.
        adapter: LoRA adapter of PEFT whose factors the graphs take as inputs (`export --lora-inputs`); the reference is
            the eager model with that adapter, not merged. Nothing is recorded.
        budget: seconds after which only mandatory scenarios run (`verify.scenarios.budget`); None for no limit.

    Raises:
        InputRefused: the folder or reference cannot be used, a graph refers to other folders, or memory is too small.
        OutOfMemory: memory ran out during the run.
        UsageProblem: an unknown suite or scenario, quantized weights without `reference`, or the folder for the
            smallest failing piece is not empty.
    """
    from llmconv.export.families import extra_inputs_of, image_inputs_of  # noqa: PLC0415 - the table alone

    require_limits(max_divergence=max_divergence, min_agreement=min_agreement)
    chosen = Method.of(method, layers)
    selection = Selection(suite, only, repeat, Budget.of(budget, only))
    session = Session.of(selection, settings, on_checks, bisect=bisect, minimize=minimize)
    record = record and not is_remote(folder)  # a download is removed by the end
    folder = require_folder(folder)
    report = session.new_report(folder.name)
    entries, single = graph_entries(folder), single_pass_entries(folder)
    if not entries and not single:
        report.notes.append(f"no graphs in `{require_model(folder)}`; make them with `llmconv export {folder}`")
        return report
    reference = require_weights(folder, [*entries, *single][0], reference or recorded_reference(folder))
    report.reference = reference.name
    unseeing = () if has_vision(folder) else image_inputs_of(reference)
    entries = [replace(entry, fixed_inputs=(*entry.fixed_inputs, *unseeing)) for entry in entries]
    settings = replace(session.settings, extra_inputs=partial(extra_inputs_of, reference))
    session = replace(session, settings=settings)
    rest = _single_pass(folder, single, reference, report, session, allow_changed) if single and not only else None
    if not entries and adapter is not None:
        raise UsageProblem("`--adapter` applies to graphs with a cache", hint="leave out `--adapter`")
    if not entries:
        return _verify_alone(rest, chosen, only, low_memory, record)
    verified = VerifiedFolder(folder, entries, _models(folder, entries), session.settings)
    calibrated = Path(calibrate) if calibrate else None
    code = reference if trust_remote_code else None
    cost = _cost_options(verified, text, AccuracyLimits(max_divergence, min_agreement), calibrated, code)
    coded = CodedFolder.of(verified, calibrated, cost, prepack=is_quantized(verified.models))
    if chosen.is_forced and (coded or is_quantized(verified.models)):
        raise UsageProblem(
            f"`--method {chosen.name}` applies to graphs of floats only", hint="leave out `--method`, or give `whole`"
        )
    if low_memory and (coded or is_quantized(verified.models)):
        raise UsageProblem("`--low-memory` compares graphs of floats only", hint="leave out `--low-memory`")
    if adapter is not None:
        _require_alone(coded, verified, chosen, eager, low_memory)
        verified, eager = adapted(verified, reference, adapter, code)
        chosen, low_memory, record, rest = Method(WHOLE), False, False, None
        report.notes.append(
            f"the graphs ran with the factors of `{Path(adapter).name}`, as constants of copies in memory"
        )
    report.unseen += unseen_factors(verified.models, adapter)
    report.unseen += ["graphs without a cache"] if single and rest is None else []
    floats = FloatFolder(verified, reference, report, session, code, allow_changed)
    with ExitStack() as stack:
        if record:
            stack.enter_context(recording(_with(verified, rest), reference, report, only))
        if coded:
            checks = _coded_checks(coded, floats, eager, stack)
        elif is_quantized(verified.models):
            checks = _quantized_checks(floats, eager, cost)
        else:
            checks = floats.checks(chosen, eager, low_memory)
        return session.run(report, _after(checks, rest), most_precise)


def _single_pass(
    folder: Path, entries: list[GraphEntry], reference: Path, report: Report, session: Session, allow_changed: bool
) -> SinglePassFolder:
    """The graphs without a cache."""
    verified = VerifiedFolder(folder, entries, _models(folder, entries), session.settings)
    return SinglePassFolder(verified, reference, report, session, allow_changed)


def _with(verified: VerifiedFolder, rest: SinglePassFolder | None) -> VerifiedFolder:
    """All graphs of a folder, for the record of the verdict."""
    if rest is None:
        return verified
    other = rest.verified
    return replace(verified, entries=[*verified.entries, *other.entries], models={**verified.models, **other.models})


def _after(checks: Checking, rest: SinglePassFolder | None) -> Checking:
    """The checks of graphs with a cache, then those of graphs without."""
    found = yield from checks
    if rest:
        yield from rest.checks(alone=False)
    return found


def _alone(rest: SinglePassFolder) -> Checking:
    yield from rest.checks(alone=True)
    return None, rest.verified


def _verify_alone(
    rest: SinglePassFolder | None, method: Method, only: Sequence[str], low_memory: bool | None, record: bool
) -> Report:
    """Verifies a folder whose graphs have no cache.

    Raises:
        UsageProblem: an option of graphs with a cache.
    """
    options = {"--method": method.is_forced, "--scenario": bool(only), "--low-memory": bool(low_memory)}
    if (given := [name for name, value in options.items() if value]) or rest is None:
        raise UsageProblem(
            f"`{given[0]}` applies to graphs with a cache, and this folder has none", hint=f"leave out `{given[0]}`"
        )
    with ExitStack() as stack:
        if record:
            stack.enter_context(recording(rest.verified, rest.reference, rest.report))
        return rest.session.run(rest.report, _alone(rest))


def _require_alone(
    coded: CodedFolder | None, verified: VerifiedFolder, method: Method, eager: Eager | None, low_memory: bool | None
) -> None:
    """Refuses what `adapter` excludes."""
    if eager or method.is_forced or low_memory or coded or is_quantized(verified.models):
        raise UsageProblem(
            "`--adapter` runs the whole model, with an open model of its own and graphs of floats",
            hint="leave out `--method`, `--layers` and `--low-memory`",
        )


def _coded_checks(coded: CodedFolder, folder: FloatFolder, eager: Eager | None, stack: ExitStack) -> Checking:
    """All checks of graphs with codes in their caches.

    Args:
        coded: the graphs.
        folder: the same folder, with the options of the run.
        eager: an open reference of the model, if any.
        stack: keeps copies of the graphs with caches of floats.
    """
    verified, cost = coded.verified, coded.cost
    structure = coded.structure()
    yield structure
    if any(check.verdict == "fail" for check in structure):
        return eager, verified
    copies = coded.as_floats(stack)
    model: Eager | None
    if coded.prepack:
        yield from audit_recorded_files(verified, folder.report, allow_changed=folder.allow_changed)
        files = copies, folder.reference, folder.report, folder.session
        result = yield from compare_quantized_folder(*files, eager, cost)
        model = eager or Eager(folder.reference, "float32", code=cost.code)
    else:
        result = yield from replace(folder, verified=copies).checks(Method(WHOLE), eager, False)
        model = result[0]
    if model is not None:
        yield from coded.compare(model, folder.report, folder.session)
    return result


def _quantized_checks(folder: FloatFolder, eager: Eager | None, cost: QuantizationOptions) -> Checking:
    """All checks of graphs with quantized weights; `cost` has their options."""
    files = folder.verified, folder.reference, folder.report, folder.session
    yield from audit_recorded_files(folder.verified, folder.report, allow_changed=folder.allow_changed)
    return (yield from compare_quantized_folder(*files, eager, cost))


def _models(folder: Path, entries: Sequence[GraphEntry]) -> dict[str, onnx.ModelProto]:
    """The graphs without their weights, by name, with embedding table and vision tower if they take embeddings."""
    models = {entry.name: load_whole(folder, entry) for entry in entries}
    if takes_embeddings(models.values()):
        models[EMBEDDINGS] = load_guarded(folder / EMBEDDINGS)
        if has_vision(folder):
            models[VISION] = load_guarded(folder / VISION)
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
