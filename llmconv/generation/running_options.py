"""RunningOptions: which runtime runs a model, and how; options of every function that opens one to generate text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from llmconv.errors import UsageProblem
from llmconv.generation.model import TextModel
from llmconv.runtime.onnxruntime.packed_cache import default_folder
from llmconv.runtime.onnxruntime.session_file import read_session_file
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, StageOptions, provider_name
from llmconv.runtime.stages.staged_runner import StageAddresses

Options = TypeVar("Options", SessionSettings, StageOptions)


class RunningOptions(TypedDict, total=False):
    """Which runtime runs a model, and how; with the names of the options of the command line.

    Attributes:
        backend: `onnx` (the graphs, the default), `torch` (the eager model) or `genai` (ONNX Runtime GenAI).
        decode: the decode graph, if the model is the prefill graph.
        tokenizer: a tokenizer of transformers, or the folder of one; None for the model's own.
        adapter: an adapter, for `torch`, see `TextModel.open`.
        prefix_tuning: tuned prefix before every prompt, see `TextModel.open`.
        device: torch's name of the device, for `torch`; None for the CPU.
        dtype: `float32`, `float16` or `bfloat16`, for `torch`; None for that of the weights.
        trust_remote_code: run the code in the folder: of the tokenizer and, for `torch`, of the model.
        session: session settings of onnxruntime; the options below replace single ones.
        provider: provider of onnxruntime: `cpu`, `cuda`, …; the CPU runs the rest.
        threads: threads of onnxruntime or torch; 0 for one per core.
        session_config: file of session settings, .ini or JSON.
        timeout: time limit in seconds for a run of a small graph; larger models and prompts get more (default: 60).
        prepack: copy weights to a faster layout in memory.
        packed_cache: as `prepack`, in a file that later runs map.
        stage_at: addresses of stages in other processes, `[N=]HOST:PORT` or `ray`.
        stage_timeout: seconds without a heartbeat after which a stage is lost (default: 20).
    """

    backend: str
    decode: str | Path | None
    tokenizer: Any
    adapter: str | Path | None
    prefix_tuning: str | Path | None
    device: Any
    dtype: Any
    trust_remote_code: bool
    session: SessionSettings | None
    provider: str | None
    threads: int | None
    session_config: str | Path | None
    timeout: float | None
    prepack: bool
    packed_cache: bool
    stage_at: Sequence[str]
    stage_timeout: float | None


PASSED_ON = ("backend", "decode", "tokenizer", "adapter", "prefix_tuning", "device", "dtype", "trust_remote_code")
"""Options that are passed to `TextModel.open` unchanged."""

OF_SESSION = ("session", "provider", "session_config", "prepack", "packed_cache")
"""Options that only onnxruntime has."""


def opener(model: Any, options: RunningOptions) -> Callable[[], TextModel]:
    """A function that opens a model; the options, and files that they name, are read at once.

    Args:
        model: what `TextModel.open` accepts, or an open `TextModel`.
        options: how to run it.

    Raises:
        InputRefused: a file of session settings cannot be read.
        UsageProblem: options that exclude each other, or that an open model does not take.
    """
    given: Mapping[str, Any] = options
    if isinstance(model, TextModel):
        _refuse_for_open(model, given)
        return lambda: model
    if given.get("backend") == "torch":
        _refuse_session(given)
    settings, stages = session_settings(options), _stages(given)
    passed = {name: given[name] for name in PASSED_ON if given.get(name) is not None}
    return lambda: TextModel.open(model, settings=settings, stages=stages, **passed)


def session_settings(options: RunningOptions) -> SessionSettings:
    """Session settings of onnxruntime: those of `session` or a file, with single options replaced.

    Args:
        options: those that are not for onnxruntime are ignored.

    Raises:
        InputRefused: the file cannot be read.
        UsageProblem: both `session` and a file, or an invalid provider.
    """
    session, file = options.get("session"), options.get("session_config")
    if session and file:
        raise UsageProblem("`session` and `session_config` exclude each other", hint="give one of them")
    found = session or SessionSettings()
    provider, threads = options.get("provider"), options.get("threads")
    if file:
        found = read_session_file(Path(file), found)
    stages = {number: _overridden(own, provider, threads) for number, own in found.stages.items()}
    found = replace(_overridden(found, provider, threads), stages=stages)
    changes: dict[str, Any] = {} if threads is None else {"threads": threads}
    if options.get("timeout") is not None:
        changes["timeout"] = options["timeout"]
    if options.get("prepack"):
        changes["prepack"] = True
    if options.get("packed_cache"):
        changes["packed_cache"] = default_folder()
    return replace(found, **changes)


def _stages(given: Mapping[str, Any]) -> StageAddresses | None:
    addresses, timeout = given.get("stage_at"), given.get("stage_timeout")
    if not addresses:
        if timeout is not None:
            raise UsageProblem("`--stage-timeout` needs `--stage-at`", hint="leave it out")
        return None
    return StageAddresses(addresses) if timeout is None else StageAddresses(addresses, timeout)


def _refuse_session(given: Mapping[str, Any]) -> None:
    """Refuses options of onnxruntime, which the eager model does not use."""
    odd = next((name for name in OF_SESSION[1:] if given.get(name)), None)
    if odd:
        raise UsageProblem(
            f"`--{odd.replace('_', '-')}` is for onnxruntime, which `--backend torch` does not use",
            hint="leave it out and give `--device`; or leave out `--backend torch`",
        )


def _refuse_for_open(model: TextModel, given: Mapping[str, Any]) -> None:
    """Refuses options of opening, for a model that is open."""
    for name, value in given.items():
        is_same = name == "backend" and value in ("onnx", model.backend)
        if value is not None and value is not False and value != () and not is_same:
            raise UsageProblem(
                f"`{name}` has no effect on an open model", hint="give it to `TextModel.open`, or give the folder"
            )


def _overridden(found: Options, provider: str | None, threads: int | None) -> Options:
    """Session settings, or those of a stage, without what single options replace."""
    if threads is not None:
        attributes = {name: value for name, value in found.attributes.items() if name != "intra_op_num_threads"}
        found = replace(found, attributes=attributes)
    if provider is not None and provider_name(provider) != found.provider:
        found = replace(found, provider=provider_name(provider), provider_options={})
    return found
