"""`verify`: runs the scenarios on the eager model and on every graph of a folder, and compares all outputs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import numpy_helper

from llmconv.argument_checks import checked
from llmconv.checkpoint import is_model_folder, open_checkpoint
from llmconv.convert.adapter_file import lora_factors
from llmconv.convert.opening_adapters import is_for_peft
from llmconv.errors import LlmconvError, UsageProblem, listing
from llmconv.export.rewrite.running_form import may_change
from llmconv.files.paths import Written
from llmconv.files.safe_folder import is_inner
from llmconv.files.safetensors_file import FileTensor
from llmconv.files.sources import fetches, is_remote, local_path, source_name
from llmconv.output.manifest import (
    EMBEDDINGS,
    MANIFEST,
    SINGLE_PASS_FILES,
    VERIFIED,
    VISION,
    RecordedVerdict,
    WeightFile,
    graph_entries,
    graph_sha256,
    parse_verdict,
    read_manifest,
    record_in_manifest,
    single_pass_entries,
    weight_file,
)
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, refill
from llmconv.runtime.onnxruntime.lora_names import declared_factors, module_of, require_factors, without_inputs
from llmconv.runtime.onnxruntime.session_file import CONFIG as GENAI_CONFIG
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, half_precision, with_options
from llmconv.tensors import Array
from llmconv.verify.arguments import CODES, model_of, require_folder
from llmconv.verify.audit.weights import AS_RECORDED, MAPPED
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.clients.client_files import ClientFiles, field_checks
from llmconv.verify.clients.comparison import (
    LLAMA_CPP,
    OF_WEIGHTS,
    Client,
    ClientChecks,
    EagerLogits,
    LogitsSource,
    OwnLogits,
    chosen_clients,
)
from llmconv.verify.comparison.cache_copies import has_codes
from llmconv.verify.comparison.half_precision import most_precise
from llmconv.verify.comparison.images import FEATURES
from llmconv.verify.comparison.run import AS_RUN
from llmconv.verify.float_folder import AUTO, STRUCTURE, FloatFolder, Method
from llmconv.verify.graph_folder import GraphFolder
from llmconv.verify.other_exporters.quantized.accuracy import AccuracyLimits, rounds_activations
from llmconv.verify.other_exporters.quantized.dequantized_reference import StoredSmoothing
from llmconv.verify.other_exporters.quantized.rounding_error import ExpectedCodes
from llmconv.verify.other_exporters.quantized_verdict import QuantizationOptions
from llmconv.verify.other_exporters.run import require_limits
from llmconv.verify.quantized_cache import CodedFolder, recorded_text
from llmconv.verify.quantized_folder import QuantizedFolder, is_quantized, shipped_runner
from llmconv.verify.reference.eager import Eager
from llmconv.verify.report.files import reporter
from llmconv.verify.results import LINE_LIMIT, WHOLE, Report, clean
from llmconv.verify.scenarios.selection import Budget, Selection
from llmconv.verify.single_pass import MODULES, Modules, SinglePassFolder
from llmconv.verify.verification import Checking, OnChecks, Session

if TYPE_CHECKING:
    from llmconv.verify.mtp import MtpFolder


@fetches
@checked
def verify(  # noqa: PLR0913 - one parameter per option of the command
    folder: str | Path,
    *,
    reference: str | Path | None = None,
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
    clients: str | Sequence[str] = (),
    pythons: str | Sequence[str] = (),
    report: Written | None = None,
) -> Report:
    """Compares every output of every graph in a folder with the eager model.

    Args:
        folder: a folder that `llmconv export` wrote; for `llamacpp` a GGUF file, or the folder of one; for `vllm` a
            Hugging Face folder.
        reference: the Hugging Face model folder, or a GGUF file (default: as in the manifest, else `folder`).
        suite: which set of scenarios to run, `quick` or `full`.
        scenario: names of scenarios; if given, only these are run.
        repeat: number of runs of each call; all must give the same bits.
        settings: of onnxruntime; the next three replace single ones.
        provider: provider of onnxruntime: `cpu`, `cuda`, …; the CPU runs the rest.
        threads: threads of onnxruntime; 0 for one per core.
        timeout: time limit in seconds of a run of a small graph; larger graphs get more (default: 60).
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
        record: record the verdict in the manifest of `folder`, if it has one and is not an address.
        adapter: LoRA adapter, unmerged in the reference: graphs take its factors, vLLM serves it. Nothing is recorded.
        clients: `genai`, `optimum` or `transformersjs`, whose tokens are compared; or `llamacpp` or `vllm`, see folder.
        pythons: `CLIENT=PATH` of a Python that has the client, or of the folder with its `node_modules`.
        report: a folder to write the report into, as report.json, report.html, summary.md and junit.xml.
        budget: seconds after which only mandatory scenarios run (`verify.scenarios.budget`); None for no limit.

    Raises:
        InputRefused: the folder has no graphs, it or the reference cannot be used, a graph refers to other folders,
            memory is too small, or a client is not installed.
        OutOfMemory: memory ran out during the run.
        UsageProblem: an unknown suite or scenario, options that exclude each other or that the graphs do not have,
            quantized weights without `reference`, or the folder for the smallest failing piece is not empty.
    """
    require_limits(max_divergence=max_divergence, min_agreement=min_agreement)
    chosen, run_by = Method.of(method, layers), chosen_clients(clients, pythons)
    only = [scenario] if isinstance(scenario, str) else scenario
    selection = Selection(suite, only, repeat, Budget.of(budget, only))
    own = with_options(settings, provider, threads, timeout)
    session = Session.of(selection, own, on_checks, bisect=bisect, minimize=minimize)
    chosen.require_runs(session, low_memory=low_memory)
    written = reporter(report)
    accuracy = Path(text) if text else None, AccuracyLimits(max_divergence, min_agreement)
    measured, record = Path(calibrate) if calibrate else None, record and not is_remote(folder)
    choices = Choices(chosen, eager, low_memory, adapter, *accuracy, measured, record, run_by)
    kept = {"allow_changed": allow_changed, "trusted": trust_remote_code}
    if any(client.name in OF_WEIGHTS for client in run_by):
        return written(_checked_weights(folder, reference, session, choices, **kept))
    path = require_folder(folder)
    for client in run_by:
        client.require()
    check = _checked_codes if _has_codes(path) else _checked_graphs
    return written(check(path, reference, session, choices, **kept))


def _has_codes(path: Path) -> bool:
    """Whether a folder is one of `llmconv quantize`, or of compressed-tensors, and no graphs."""
    if not is_model_folder(path) or graph_entries(path) or single_pass_entries(path):
        return False
    from llmconv.verify.compressed.folder import is_compressed  # noqa: PLC0415 - graphs need none of it

    return is_compressed(path)


@dataclass(frozen=True)
class Choices:
    """The options of `verify`, described there, that decide which checks are made."""

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


def _checked_weights(
    path: str | Path,
    reference: str | Path | None,
    session: Session,
    choices: Choices,
    *,
    allow_changed: bool,
    trusted: bool,
) -> Report:
    """The report of weights in llama.cpp or vLLM; UsageProblem for several clients, and options of graphs."""
    client = next(one for one in choices.clients if one.name in OF_WEIGHTS)
    if len(choices.clients) > 1:
        problem = f"`{client.name}` opens {OF_WEIGHTS[client.name]}, other clients do not"
        raise UsageProblem(problem, hint="verify them one after another")
    given = {"--suite": session.selection.suite != "quick"}
    given |= _options_of_runs(session, choices, allow_changed=allow_changed, trusted=trusted)
    of_runs = next((name for name, value in given.items() if value), "")
    rest = replace(choices, clients=())
    if client.name == LLAMA_CPP:
        if name := of_runs or rest.of_cache:
            raise UsageProblem(f"`{name}` applies to graphs, and llama.cpp opens none", hint=f"leave out `{name}`")
        from llmconv.verify.clients.llamacpp import checked_file  # noqa: PLC0415 - it runs no graphs

        return checked_file(path, reference, client, session, choices.low_memory)
    if name := of_runs or replace(rest, adapter=None).of_cache:
        raise UsageProblem(f"`{name}` applies to graphs, and vLLM opens none", hint=f"leave out `{name}`")
    from llmconv.verify.clients.vllm import checked_by_vllm  # noqa: PLC0415 - it runs no graphs

    def codes(folder: Path) -> Report:
        plain = replace(rest, adapter=None)
        return _checked_codes(folder, reference, session, plain, allow_changed=False, trusted=False)

    return checked_by_vllm(path, reference, choices.adapter, client, session, choices.low_memory, codes)


def _options_of_runs(session: Session, choices: Choices, *, allow_changed: bool, trusted: bool) -> dict[str, bool]:
    """Options that only graphs have, and whether they are given."""
    selection = session.selection
    return {
        "--scenario": bool(selection.only),
        "--repeat": selection.repeat > 1,
        "--budget": selection.budget is not None,
        "--bisect": session.bisect,
        "--minimize": session.minimized is not None,
        "--allow-changed": allow_changed,
        "--trust-remote-code": trusted,
        "--provider, --threads or --timeout": session.settings != SessionSettings(),
        "eager": choices.eager is not None,
    }


def _checked_codes(
    path: Path,
    reference: str | Path | None,
    session: Session,
    choices: Choices,
    *,
    allow_changed: bool,
    trusted: bool,
) -> Report:
    """The report of a folder of `llmconv quantize`; UsageProblem for options that apply to graphs."""
    given = _options_of_runs(session, choices, allow_changed=allow_changed, trusted=trusted)
    others = replace(choices, text=None, limits=AccuracyLimits(), adapter=None)
    if name := next((name for name, value in given.items() if value), "") or others.of_cache:
        raise UsageProblem(f"`{name}` applies to graphs, and this folder has none", hint=f"leave out `{name}`")
    adapters = [Path(choices.adapter)] if choices.adapter is not None else []
    from llmconv.verify.compressed.folder import CompressedFolder  # noqa: PLC0415 - graphs need none of it

    folder = CompressedFolder.open(path, reference, adapters, session)
    with ExitStack() as stack:
        if choices.record and not adapters:
            stack.enter_context(recording(Judged.of_codes(path), Path(folder.reference.path), folder.report))
        return folder.checked(choices.text, choices.limits)


def _checked_graphs(
    path: Path, reference: str | Path | None, session: Session, choices: Choices, **kept: bool
) -> Report:
    with model_of(reference) as model:
        opened = GraphFolder.open(path, model, session.new_report(path.name), session, **kept)
        return checked_folder(opened, choices)


def checked_folder(folder: GraphFolder, choices: Choices) -> Report:
    """The report of all checks of a folder; UsageProblem for options that the graphs do not have."""
    rest = folder.without_cache()
    if not folder.entries:
        return _checked_alone(folder, rest, choices)
    verified = folder.with_cache()
    cost = _cost_options(verified, choices, folder.code)
    coded = CodedFolder.of(verified, choices.calibrated, cost, prepack=is_quantized(verified.models))
    _require_whole(coded, choices)
    if choices.adapter is not None:
        verified, choices, rest = *_with_adapter(folder, verified, coded, choices, choices.adapter), None
    folder.report.unseen += unseen_factors(verified.models, choices.adapter)
    folder.report.unseen += (
        ["faults of graphs without a cache (`--scenario` leaves them out)"] if folder.single and rest is None else []
    )
    floats = FloatFolder(verified, folder.reference, folder.report, folder.session, folder.code, folder.allow_changed)
    mtp = folder.mtp_head()
    with ExitStack() as stack:
        if choices.record:
            only = folder.session.selection.only
            judged = Judged.of_graphs(_with(_with(verified, rest), mtp))
            stack.enter_context(recording(judged, folder.reference, folder.report, only))
        if coded:
            checks = _coded_checks(coded, floats, choices.eager, stack)
        elif is_quantized(verified.models):
            checks = _quantized_checks(floats, choices, cost)
        else:
            checks = floats.checks(choices.method, choices.eager, choices.low_memory)
        has_codes = bool(coded) or is_quantized(verified.models)
        checks = _in_turn(checks, floats, choices.clients, rest, cost, has_codes=has_codes)
        return folder.session.run(folder.report, checks if mtp is None else _then(checks, mtp, cost), most_precise)


def _then(checks: Checking, mtp: MtpFolder, cost: QuantizationOptions) -> Checking:
    found = yield from checks
    yield from mtp.checks(cost)
    return found


def _in_turn(
    checks: Checking,
    folder: FloatFolder,
    clients: Sequence[Client],
    rest: SinglePassFolder | None,
    cost: QuantizationOptions,
    *,
    has_codes: bool,
) -> Checking:
    """The checks of the graphs, of tokens that clients generate, of GenAI's configuration, of graphs without a cache.

    With `has_codes`, weights or caches are quantized, and the tokens are those of llmconv's own loop: what the codes
    change is measured by the checks before.
    """
    found = yield from checks
    verified, reference = folder.verified, folder.reference
    if clients:

        def source() -> LogitsSource:
            if has_codes:
                return OwnLogits(shipped_runner(verified)[1])
            half = half_precision(next(iter(verified.models.values())))
            return EagerLogits(folder.rounded_model() if half else reference, half or "float32", folder.code)

        files = ClientFiles(verified, reference)
        yield from ClientChecks(clients, verified.path, reference, source, files).checks()
    own = verified.path if (verified.path / "config.json").is_file() else reference
    if fields := field_checks(verified.path, verified.models, own):
        yield fields
    if rest:
        yield from rest.checks(cost, alone=False)
    judged = any(check.graph.endswith(AS_RUN) for check in folder.report.checks)
    if not judged and any(map(may_change, verified.models.values())):
        folder.report.unseen.append(
            "faults of the form in which `generate` runs the graphs (`generate --form file` avoids it)"
        )
    return found


def _require_whole(coded: CodedFolder | None, choices: Choices) -> None:
    """Raises UsageProblem for a method that caches of integer codes do not have."""
    if coded and choices.method.is_forced:
        problem = f"`--method {choices.method.name}` does not apply to graphs with a cache of integers"
        raise UsageProblem(problem, hint="leave out `--method`, or give `whole`")
    if coded and choices.low_memory:
        raise UsageProblem(
            "`--low-memory` compares graphs with a cache of floats only", hint="leave out `--low-memory`"
        )


def _with_adapter(
    folder: GraphFolder, verified: VerifiedFolder, coded: CodedFolder | None, choices: Choices, adapter: str | Path
) -> tuple[VerifiedFolder, Choices]:
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
    selection = folder.session.selection
    of_runs = {"--scenario": rest is None, "--budget": selection.budget is not None, "--repeat": selection.repeat > 1}
    if option := choices.of_cache or next((name for name, is_given in of_runs.items() if is_given), ""):
        raise UsageProblem(
            f"`{option}` applies to graphs with a cache, and this folder has none", hint=f"leave out `{option}`"
        )
    assert rest
    cost = _cost_options(rest.verified, choices, None)
    with ExitStack() as stack:
        if choices.record:
            stack.enter_context(recording(Judged.of_graphs(rest.verified), rest.reference, rest.report))
        return rest.session.run(folder.report, _alone(rest, cost))


def _with(verified: VerifiedFolder, rest: SinglePassFolder | MtpFolder | None) -> VerifiedFolder:
    if rest is None:
        return verified
    other = rest.verified
    return replace(verified, entries=[*verified.entries, *other.entries], models={**verified.models, **other.models})


def _alone(rest: SinglePassFolder, cost: QuantizationOptions) -> Checking:
    yield from rest.checks(cost, alone=True)
    return None, rest.verified


def _coded_checks(coded: CodedFolder, folder: FloatFolder, eager: Eager | None, stack: ExitStack) -> Checking:
    """All checks of graphs with codes in their caches; `stack` keeps their copies with caches of floats."""
    verified, cost = coded.verified, coded.cost
    structure = coded.structure()
    yield structure
    if any(check.verdict == "fail" for check in structure):
        return eager, verified
    copies = coded.as_floats(stack)
    model: Eager | None
    if coded.prepack:
        yield from replace(folder, verified=verified).recorded_files()
        quantized = QuantizedFolder(copies, folder.reference, folder.report, folder.session, cost)
        result = yield from quantized.checks(Method(WHOLE), eager, None)
        model = eager or Eager(folder.reference, "float32", code=cost.code)
    else:
        result = yield from replace(folder, verified=copies).checks(Method(WHOLE), eager, False)
        model = result[0]
    if model is not None:
        yield from coded.compare(model, folder.report, folder.session)
    return result


def _quantized_checks(folder: FloatFolder, choices: Choices, cost: QuantizationOptions) -> Checking:
    yield from folder.recorded_files(hashes=choices.method.name != STRUCTURE)
    quantized = QuantizedFolder(folder.verified, folder.reference, folder.report, folder.session, cost)
    return (yield from quantized.checks(choices.method, choices.eager, choices.low_memory))


def _cost_options(verified: VerifiedFolder, choices: Choices, code: Path | None) -> QuantizationOptions:
    """The options for quantized graphs; graphs of floats take none."""
    quantized = is_quantized(verified.models) or any(map(has_codes, verified.models.values()))
    if not quantized and (choices.text is not None or choices.limits.given):
        raise UsageProblem(
            "`--text`, `--max-divergence` and `--min-agreement` apply to quantized weights and caches only",
            hint="leave them out",
        )
    rounds = any(map(rounds_activations, verified.models.values()))
    ranges = recorded_text(verified.path, choices.calibrated) if rounds else None
    preset = recorded(verified.path, "quant")
    own = bool(preset) or any(verified.path.glob(CODES))
    smoothing = StoredSmoothing.of(verified.path)
    method, weighted = recorded(verified.path, "method"), bool(recorded(verified.path, "calibrate"))
    importance = smoothing.importance if weighted and (smoothing.importance or method == BY_COLUMNS) else None
    codes = ExpectedCodes(own, method == "rtn", weighted, method == "gptq", importance=importance)
    return QuantizationOptions(choices.text, choices.limits, preset, code, codes, smoothing, ranges, own=True)


BY_COLUMNS = "awq-columns"  # the method of `export --quant` whose folders always have the importance of columns


def recorded(folder: Path, option: str) -> str:
    """The latest value of an option in the folder's manifest; empty without one.

    `quant` is that of `--quant`, or the method of a model that was quantized before.
    """
    options = [step.get("options") for step in read_manifest(folder).steps]
    values = [found.get(option) for found in options if isinstance(found, dict)]
    return next((value for value in reversed(values) if isinstance(value, str)), "")


NAMED = ", with the adapter"  # suffix of the names of the scenarios


def adapted(
    verified: VerifiedFolder, reference: Path, adapter: str | Path, code: Path | None
) -> tuple[VerifiedFolder, Eager]:
    """The graphs with the factors of an adapter, and the eager model with PEFT's adapter around its layers.

    `adapter` is a LoRA adapter in PEFT's own files; PEFT is the reference. `code` is the model's folder where its own
    code is trusted. Raises InputRefused: the graphs have no inputs for the modules of the adapter, or it is of another
    model; UnsupportedInput: another kind of adapter than LoRA; UsageProblem: not an adapter of PEFT.
    """
    path = local_path(adapter)
    if not is_for_peft(path):
        raise UsageProblem(
            f"`--adapter` compares with PEFT, and `{path}` is not a PEFT adapter with safetensors weights",
            hint="merge it with `llmconv merge-lora`, and verify graphs of the result",
        )
    declared = {name: declared_factors(model) for name, model in verified.models.items()}
    if not all(declared.values()):
        raise without_inputs("or verify graphs of the merged model")
    factors = lora_factors(reference, path)
    for inputs in declared.values():
        require_factors(factors, inputs)
    eager = Eager(reference, "float32", code=code, adapter=path)
    return verified.changed(partial(_bake, factors=factors), NAMED), eager


def unseen_factors(models: Mapping[str, onnx.ModelProto], adapter: str | Path | None) -> list[str]:
    """Descriptions of the inputs for factors that run with their empty defaults only."""
    modules = sorted({module_of(name) for model in models.values() for name in declared_factors(model)})
    if not modules:
        return []
    if adapter is None:
        return ["faults of LoRA factors (`--adapter` runs them)"]
    return [f"faults of LoRA factors of {listing(modules)}"]


def _bake(model: onnx.ModelProto, factors: Mapping[str, Array]) -> None:
    """Makes the factors constants of a graph, in place; inputs of other modules keep their defaults."""
    graph = model.graph
    kept = [tensor for tensor in graph.initializer if tensor.name not in factors]
    ports = [port for port in graph.input if port.name not in factors]
    given = [numpy_helper.from_array(array, name) for name, array in factors.items()]
    refill(graph.initializer, [*kept, *given])
    refill(graph.input, ports)


@dataclass(frozen=True)
class Judged:
    """The files in a folder that a verdict is about, as they are before the run."""

    path: Path
    graphs: Mapping[str, str]  # sha256 by name
    weights: Mapping[str, WeightFile | None]
    configs: Mapping[str, str]  # sha256 by name of the files that say what weights, or the model, are

    @classmethod
    def of_graphs(cls, verified: VerifiedFolder) -> Judged:
        parts = [verified.path / name for name in (EMBEDDINGS, VISION) if name in verified.models]
        paths = [*(path for entry in verified.entries for path in entry.paths(verified.path)), *parts]
        tensors = (tensor for model in verified.models.values() for tensor in external_tensors(model))
        names = {external_fields(tensor).get("location", "") for tensor in tensors}
        weights = {name: weight_file(verified.path / name) for name in names if name.endswith(MAPPED)}
        configs = {name: graph_sha256(verified.path / name) for name in _configs(verified)}
        return cls(verified.path, {path.name: graph_sha256(path) for path in paths}, weights, configs)

    @classmethod
    def of_codes(cls, path: Path) -> Judged:
        """Those of a folder of `llmconv quantize`."""
        names = {tensor.location for tensor in open_checkpoint(path).values() if isinstance(tensor, FileTensor)}
        configs = {"config.json": graph_sha256(path / "config.json")}
        return cls(path, {}, {name: weight_file(path / name) for name in names}, configs)


def _configs(verified: VerifiedFolder) -> list[str]:
    """The files that say what the model is, what follows it, and how a client runs it, which is compared with both."""
    names = ["config.json"]
    if (verified.path / GENAI_CONFIG).is_file():
        names += [GENAI_CONFIG, "generation_config.json"]
    if any(entry.role in SINGLE_PASS_FILES for entry in verified.entries):
        names.append(MODULES)
        with suppress(LlmconvError):  # the checks report what is wrong with it
            homes = [home for _, home, _ in Modules(verified.path).listed if home]
            names += [name for home in homes if is_inner(name := f"{home}/config.json")]
    return [name for name in names if (verified.path / name).is_file()]


@contextmanager
def recording(judged: Judged, reference: Path, report: Report, only: Sequence[str] = ()) -> Iterator[None]:
    """Records the verdict in `llmconv.json` when the block ends without an error.

    A file that changes during the run is out of date afterwards. A folder without a manifest stays as it is; a manifest
    that cannot be written is a note in the report, which is complete when the block ends.
    """
    if not (judged.path / MANIFEST).is_file():
        yield
        return
    recorded = {name: str(entry.get("sha256", "")) for name, entry in read_manifest(judged.path).files.items()}
    yield
    unchanged = [one.graph for one in report.checks if one.name == "weights" and one.detail == AS_RECORDED]
    known = {name: recorded.get(name, "") for name in unchanged}
    weights = judged.weights.items()
    files = {name: WeightFile(f.bytes, f.header_sha256, known.get(name, "")) for name, f in weights if f}
    saw_images = any(check.name == FEATURES and check.verdict != "skip" for check in report.checks)
    graphs = {name: sha256 for name, sha256 in judged.graphs.items() if name != VISION or saw_images}
    verdict = _verdict(report, reference, only, graphs, files, judged.configs)
    if (earlier := _recorded(judged.path)) and earlier.contains(verdict):
        report.notes.append(f"`{MANIFEST}` keeps the verdict on these files by {earlier.checks['passed']} checks")
        return
    if problem := record_in_manifest(judged.path, VERIFIED, verdict.as_dict()):
        report.notes.append(f"the verdict is not recorded in `{MANIFEST}`: {problem}")


def _recorded(folder: Path) -> RecordedVerdict | None:
    """The verdict that the manifest has; None if there is none, or none of its form."""
    with suppress(LlmconvError):
        found = read_manifest(folder).verified
        return None if found is None else parse_verdict(found)
    return None


def _verdict(
    report: Report,
    reference: Path,
    only: Sequence[str],
    graphs: Mapping[str, str],
    weights: Mapping[str, WeightFile],
    configs: Mapping[str, str],
) -> RecordedVerdict:
    verdicts = [check.verdict for check in report.checks]
    return RecordedVerdict(
        report.verdict,
        report.method,
        report.suite,
        tuple(only),
        {name: verdicts.count(key) for name, key in (("passed", "pass"), ("failed", "fail"), ("skipped", "skip"))},
        tuple(clean(text, LINE_LIMIT) for text in dict.fromkeys(report.unseen)),
        clean(source_name(Path(os.path.abspath(reference)))),
        report.versions,
        graphs,
        weights,
        configs,
    )
