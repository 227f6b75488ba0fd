"""RunningOptions: which runtime runs a model, and how; options of every function that opens one to generate text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.errors import UsageProblem
from llmconv.generation.model import TextModel
from llmconv.runtime.onnxruntime.session_file import SessionOptions, session_settings
from llmconv.runtime.stages.staged_runner import StageAddresses


class RunningOptions(SessionOptions, total=False):
    """Which runtime runs a model, and how: those of sessions, and these, with the names of the command line.

    Attributes:
        backend: `onnx` (the graphs, the default), `torch` (the eager model) or `genai` (ONNX Runtime GenAI).
        decode: the decode graph, if the model is the prefill graph.
        tokenizer: a tokenizer of transformers, or the folder of one; None for the model's own.
        adapter: an adapter, for `torch`, see `TextModel.open`.
        prefix_tuning: tuned prefix before every prompt, see `TextModel.open`.
        device: torch's name of the device, for `torch`; None for the CPU.
        dtype: `float32`, `float16` or `bfloat16`, for `torch`; None for that of the weights.
        trust_remote_code: run the code in the folder: of the tokenizer and, for `torch`, of the model.
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
    stage_at: Sequence[str]
    stage_timeout: float | None


PASSED_ON = ("backend", "decode", "tokenizer", "adapter", "prefix_tuning", "device", "dtype", "trust_remote_code")
"""Options that are passed to `TextModel.open` unchanged."""

OF_SESSION = ("session", "provider", "session_config", "prepack", "packed_cache")
"""Options that only onnxruntime has."""


def opener(model: Any, options: RunningOptions) -> Callable[[], TextModel]:
    """A function that opens what `TextModel.open` accepts, or returns an open `TextModel`.

    The options, and files in them, are read at once (InputRefused). Raises UsageProblem for options that exclude each
    other, or that an open model does not take.
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
