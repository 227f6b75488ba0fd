"""Which checks the graphs of a folder get: of floats, of codes, with an adapter, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from llmconv.errors import UsageProblem
from llmconv.output.manifest import read_manifest
from llmconv.verify.adapted_folder import adapted, unseen_factors
from llmconv.verify.arguments import CODES
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.clients.client import Client
from llmconv.verify.clients.genai_fields import field_checks
from llmconv.verify.comparison.cache_copies import has_codes
from llmconv.verify.comparison.half_precision import most_precise
from llmconv.verify.float_folder import FloatFolder
from llmconv.verify.folder_audits import audit_recorded_files
from llmconv.verify.generation_checks import then_generation
from llmconv.verify.graph_folder import GraphFolder
from llmconv.verify.method import Method
from llmconv.verify.other_exporters.quantized.accuracy_gates import AccuracyLimits
from llmconv.verify.other_exporters.quantized.activation_ranges import rounds_activations
from llmconv.verify.other_exporters.quantized.expected_codes import ExpectedCodes
from llmconv.verify.other_exporters.quantized.smoothing import StoredSmoothing
from llmconv.verify.other_exporters.verdicts.quantized import QuantizationOptions
from llmconv.verify.quantized_cache import CodedFolder
from llmconv.verify.quantized_folder import compare_quantized_folder, is_quantized
from llmconv.verify.recorded_text import recorded_text
from llmconv.verify.recorded_verdict import recording
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import WHOLE, Report
from llmconv.verify.single_pass.comparison import SinglePassFolder
from llmconv.verify.verification import Checking


@dataclass(frozen=True)
class Choices:
    """The options of `verify` that decide which checks are made; see there.

    Attributes:
        method: how the model is run.
        eager: an open reference.
        low_memory: hold one layer at a time; None to decide by free memory.
        adapter: LoRA adapter whose factors the graphs take.
        text: for the accuracy of quantized weights.
        limits: of that accuracy.
        calibrated: the text of measured ranges.
        record: record the verdict in the manifest.
        clients: programs that generate with the graphs.
    """

    method: Method
    eager: Eager | None = None
    low_memory: bool | None = None
    adapter: str | Path | None = None
    text: Path | None = None
    limits: AccuracyLimits = AccuracyLimits()
    calibrated: Path | None = None
    record: bool = True
    clients: Sequence[Client] = ()

    @property
    def of_cache(self) -> str:
        """The first given option that only graphs with a cache have; empty if there is none."""
        given = {
            "--method": self.method.is_forced,
            "--low-memory": bool(self.low_memory),
            "--adapter": self.adapter is not None,
            "--client": bool(self.clients),
            "--text": self.text is not None,
            "--max-divergence": self.limits.divergence is not None,
            "--min-agreement": self.limits.agreement is not None,
            "--calibrate": self.calibrated is not None,
        }
        return next((name for name, value in given.items() if value), "")


def checked_folder(folder: GraphFolder, choices: Choices) -> Report:
    """The report of all checks of a folder.

    Args:
        folder: the graphs.
        choices: which checks.

    Raises:
        UsageProblem: options that the graphs do not have.
    """
    rest = folder.without_cache()
    if not folder.entries:
        return _checked_alone(folder, rest, choices)
    verified = folder.with_cache()
    cost = _cost_options(verified, choices, folder.code)
    coded = CodedFolder.of(verified, choices.calibrated, cost, prepack=is_quantized(verified.models))
    _require_floats(verified, coded, choices)
    if choices.adapter is not None:
        verified, choices, rest = *_with_adapter(folder, verified, coded, choices, choices.adapter), None
    folder.report.unseen += unseen_factors(verified.models, choices.adapter)
    folder.report.unseen += (
        ["faults of graphs without a cache (`--scenario` leaves them out)"] if folder.single and rest is None else []
    )
    floats = FloatFolder(verified, folder.reference, folder.report, folder.session, folder.code, folder.allow_changed)
    with ExitStack() as stack:
        if choices.record:
            only = folder.session.selection.only
            stack.enter_context(recording(_with(verified, rest), folder.reference, folder.report, only))
        if coded:
            checks = _coded_checks(coded, floats, choices.eager, stack)
        elif is_quantized(verified.models):
            checks = _quantized_checks(floats, choices, cost)
        else:
            checks = floats.checks(choices.method, choices.eager, choices.low_memory)
        if choices.clients:
            has_codes = bool(coded) or is_quantized(verified.models)
            checks = then_generation(checks, floats, choices.clients, has_codes=has_codes)
        checks = _then_fields(checks, verified, folder.reference)
        return folder.session.run(folder.report, _after(checks, rest), most_precise)


def _then_fields(checks: Checking, verified: VerifiedFolder, reference: Path) -> Checking:
    """The checks of the graphs, then that of the configuration from which GenAI opens them."""
    found = yield from checks
    own = verified.path if (verified.path / "config.json").is_file() else reference
    if fields := field_checks(verified.path, verified.models, own):
        yield fields
    return found


def _require_floats(verified: VerifiedFolder, coded: CodedFolder | None, choices: Choices) -> None:
    """Refuses options of graphs of floats."""
    if not coded and not is_quantized(verified.models):
        return
    if choices.method.is_forced:
        raise UsageProblem(
            f"`--method {choices.method.name}` applies to graphs of floats only",
            hint="leave out `--method`, or give `whole`",
        )
    if choices.low_memory:
        raise UsageProblem("`--low-memory` compares graphs of floats only", hint="leave out `--low-memory`")


def _with_adapter(
    folder: GraphFolder, verified: VerifiedFolder, coded: CodedFolder | None, choices: Choices, adapter: str | Path
) -> tuple[VerifiedFolder, Choices]:
    """The graphs with the factors of an adapter, and the choices that fit them."""
    if choices.clients:
        raise UsageProblem("a client runs the graphs without an adapter", hint="leave out `--adapter` or `--client`")
    if choices.eager or choices.method.is_forced or choices.low_memory or coded or is_quantized(verified.models):
        raise UsageProblem(
            "`--adapter` runs the whole model, with an open model of its own and graphs of floats",
            hint="leave out `--method`, `--layers` and `--low-memory`",
        )
    changed, eager = adapted(verified, folder.reference, adapter, folder.code)
    name = Path(adapter).name
    folder.report.notes.append(f"the graphs ran with the factors of `{name}`, as constants of copies in memory")
    return changed, replace(choices, method=Method(WHOLE), eager=eager, low_memory=False, record=False)


def _checked_alone(folder: GraphFolder, rest: SinglePassFolder | None, choices: Choices) -> Report:
    """Verifies a folder whose graphs have no cache."""
    selection = folder.session.selection
    of_runs = {"--scenario": rest is None, "--budget": selection.budget is not None, "--repeat": selection.repeat > 1}
    if option := choices.of_cache or next((name for name, is_given in of_runs.items() if is_given), ""):
        raise UsageProblem(
            f"`{option}` applies to graphs with a cache, and this folder has none", hint=f"leave out `{option}`"
        )
    assert rest
    with ExitStack() as stack:
        if choices.record:
            stack.enter_context(recording(rest.verified, rest.reference, rest.report))
        return rest.session.run(folder.report, _alone(rest))


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


def _quantized_checks(folder: FloatFolder, choices: Choices, cost: QuantizationOptions) -> Checking:
    """All checks of graphs with quantized weights; `cost` has their options."""
    files = folder.verified, folder.reference, folder.report, folder.session
    yield from audit_recorded_files(folder.verified, folder.report, allow_changed=folder.allow_changed)
    anyway = choices.low_memory is False
    return (yield from compare_quantized_folder(*files, choices.eager, cost, in_any_memory=anyway))


def _cost_options(verified: VerifiedFolder, choices: Choices, code: Path | None) -> QuantizationOptions:
    """The options for quantized graphs; graphs of floats take none."""
    quantized = is_quantized(verified.models) or any(map(has_codes, verified.models.values()))
    if not quantized and (choices.text is not None or choices.limits.given):
        raise UsageProblem(
            "`--text`, `--max-divergence` and `--min-agreement` apply to quantized weights and caches only",
            hint="leave them out",
        )
    ranges = (
        recorded_text(verified.path, choices.calibrated)
        if any(map(rounds_activations, verified.models.values()))
        else None
    )
    preset = recorded(verified.path, "quant")
    own = bool(preset) or any(verified.path.glob(CODES))
    smoothing = StoredSmoothing.of(verified.path)
    method, weighted = recorded(verified.path, "method"), bool(recorded(verified.path, "calibrate"))
    codes = ExpectedCodes(nearest=own, plain=method == "rtn", weighted=weighted, feedback=method == "gptq")
    return QuantizationOptions(choices.text, choices.limits, preset, code, codes, smoothing, ranges, own=True)


def recorded(folder: Path, option: str) -> str:
    """The latest value of an option in the folder's manifest; empty without one.

    `quant` is that of `--quant`, or the method of a model that was quantized before.
    """
    options = [step.get("options") for step in read_manifest(folder).steps]
    values = [found.get(option) for found in options if isinstance(found, dict)]
    return next((value for value in reversed(values) if isinstance(value, str)), "")
