"""Options of the commands that generate text: backend and session, sampling, chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmconv.cli.options import ElementType
from llmconv.errors import UsageProblem

if TYPE_CHECKING:
    from llmconv.generation import TextModel
    from llmconv.runtime import SessionSettings
    from llmconv.runtime.onnxruntime.session_settings import StageOptions
    from llmconv.runtime.stages.staged_runner import StageAddresses

Command = TypeVar("Command", bound=Callable[..., Any])
Options = TypeVar("Options", "SessionSettings", "StageOptions")

BACKENDS = ["onnx", "torch", "genai"]

TEMPLATE = "Chat template: tokenizer (its own), alpaca, v1_2, vicuna, or a Jinja file."

PICKING = (
    click.option(
        "--max-new-tokens",
        type=click.IntRange(1),
        help="Maximum number of new tokens. Default: generation_config.json, else 64 (chat: 2048).",
    ),
    click.option("--max-length", type=click.IntRange(1), help="Maximum number of tokens, prompt included."),
    click.option("--temperature", type=click.FloatRange(0), help="Sampling temperature; 0 means greedy decoding."),
    click.option("--top-k", type=click.IntRange(0), help="Sample from the k likeliest tokens; 0 for all. Default: 50."),
    click.option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        help="Sample from the likeliest tokens with total probability p.",
    ),
    click.option("--min-p", type=click.FloatRange(0, 1), help="Sample from tokens at least p times the likeliest."),
    click.option("--repetition-penalty", type=click.FloatRange(0, min_open=True), help="Repetition penalty; 1: none."),
    click.option("--num-beams", type=click.IntRange(1), help="Number of beams for beam search."),
    click.option("--stop", "stop_strings", multiple=True, metavar="STRING", help="Stop string. May be repeated."),
    click.option("--seed", type=click.IntRange(0), help="Random seed for sampling."),
)
BACKEND = (
    click.option("--backend", type=click.Choice(BACKENDS), default="onnx", show_default=True, help="Runtime to use."),
    click.option(
        "--adapter",
        metavar="PATH",
        help="LoRA adapter for graphs of `export --lora-inputs`; any adapter with `--backend torch`.",
    ),
    click.option(
        "--prefix-tuning",
        metavar="PATH",
        help="Tuned prefix before every prompt: PEFT adapter, or PaddleNLP's pre_caches.npy.",
    ),
    click.option("--device", metavar="NAME", help="Device of torch: cpu, cuda, cuda:1, …, with `--backend torch`."),
    click.option(
        "--dtype",
        type=ElementType(["float32", "float16", "bfloat16"]),
        help="Dtype of the model, with `--backend torch`. Default: that of its weights.",
    ),
)
SESSION = (
    click.option("--provider", metavar="NAME", help="Provider of onnxruntime: cpu, cuda, …; the CPU runs the rest."),
    click.option("--threads", type=click.IntRange(0), help="Threads of onnxruntime or torch; 0 for one per core."),
    click.option(
        "--session-config", type=click.Path(path_type=Path), metavar="FILE", help="Session options, .ini or JSON."
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="Time limit for a run of a small graph; larger models and prompts get more. Default: 60.",
    ),
    click.option("--prepack", is_flag=True, help="Copy weights to a faster layout in memory. Default: map the files."),
    click.option(
        "--packed-cache",
        is_flag=True,
        help="Like `--prepack`, but write the copy to ~/.cache/llmconv once, and map it from then on: several "
        "processes share its memory.",
    ),
)
RUNNING = (*BACKEND, *SESSION)
STAGES = (
    click.option(
        "--stage-at",
        multiple=True,
        metavar="[N=]HOST:PORT",
        help="Address of a stage that `llmconv serve-stage` runs, once per stage; the others run here, or with "
        "`--stage-at ray` in actors of a Ray cluster.",
    ),
    click.option(
        "--stage-timeout",
        type=click.FloatRange(0.1, 3600),
        metavar="SECONDS",
        help="A stage is lost after this time without a heartbeat. Default: 20.",
    ),
)


def picking(command: Command) -> Command:
    """Adds the options for sampling and length, whose defaults are in `generation_config.json`."""
    return _with(command, PICKING)


def running(command: Command) -> Command:
    """Adds the options for backend, session and stages in other processes."""
    return _with(command, (*RUNNING, *STAGES))


def session(command: Command) -> Command:
    """Adds the options for sessions of onnxruntime."""
    return _with(command, SESSION)


def _with(command: Command, decorators: tuple[Callable[[Command], Command], ...]) -> Command:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `GenerationSettings` from the options of `picking`; sampling options turn on `do_sample`."""
    fields = {name: value for name, value in given.items() if name not in OF_RUNNING and value is not None}
    if {"max_new_tokens", "max_length"} <= fields.keys():
        raise UsageProblem(
            "`--max-new-tokens` and `--max-length` both set the length",
            hint="give one of them: `--max-length` includes the prompt",
        )
    if not fields.get("stop_strings"):
        fields.pop("stop_strings", None)
    if "temperature" in fields:
        fields["do_sample"] = fields["temperature"] > 0
    elif {"top_k", "top_p", "min_p"} & fields.keys():
        fields["do_sample"] = True
    return fields


def opener(model: str, given: Mapping[str, Any]) -> Callable[[], TextModel]:
    """A function that opens a model with the given options; the session options are read at once.

    Args:
        model: a folder, a graph, or a name in the Hub's cache.
        given: values of the options of `running` and `--trust-remote-code`; others are ignored.
    """
    if given["backend"] == "torch":
        _refuse_session(given)
    if given["stage_timeout"] is not None and not given["stage_at"]:
        raise UsageProblem("`--stage-timeout` needs `--stage-at`", hint="leave it out")
    settings = session_settings(given)

    def opened() -> TextModel:
        from llmconv.generation import TextModel

        same = {name: given[name] for name in OPENING}
        return TextModel.open(model, settings=settings, stages=_stages(given), **same)

    return opened


def _stages(given: Mapping[str, Any]) -> StageAddresses | None:
    from llmconv.runtime.stages.staged_runner import StageAddresses

    if not given["stage_at"]:
        return None
    timeout = given["stage_timeout"]
    return StageAddresses(given["stage_at"]) if timeout is None else StageAddresses(given["stage_at"], timeout)


def session_settings(given: Mapping[str, Any]) -> SessionSettings:
    """Session settings from the options of `session`; others are ignored."""
    from llmconv.runtime.onnxruntime.packed_cache import default_folder

    packed_cache = default_folder() if given["packed_cache"] else None
    settings = _session(given["provider"], given["threads"], given["session_config"], given["prepack"])
    return replace(settings, timeout=given["timeout"], packed_cache=packed_cache)


def _refuse_session(given: Mapping[str, Any]) -> None:
    """Refuses options of onnxruntime, which the eager model does not use."""
    odd = next((name for name in ("provider", "session_config", "prepack", "packed_cache") if given[name]), None)
    if odd:
        raise UsageProblem(
            f"`--{odd.replace('_', '-')}` is for onnxruntime, which `--backend torch` does not use",
            hint="leave it out and give `--device`; or leave out `--backend torch`",
        )


OPENING = ("backend", "adapter", "prefix_tuning", "trust_remote_code", "device", "dtype")
"""Options that are passed to `TextModel.open` unchanged."""

OF_RUNNING = (
    *OPENING,
    "provider",
    "threads",
    "session_config",
    "prepack",
    "packed_cache",
    "timeout",
    "stage_at",
    "stage_timeout",
)
"""All options that `opener` uses."""


def _session(
    provider: str | None, threads: int | None, session_config: Path | None, prepack: bool = False
) -> SessionSettings:
    """Session settings of onnxruntime; options override the file."""
    from llmconv.runtime.onnxruntime.session_file import read_session_file
    from llmconv.runtime.onnxruntime.session_settings import SessionSettings

    found = SessionSettings(prepack=prepack)
    if session_config:
        found = read_session_file(session_config, found)
    stages = {number: _overridden(own, provider, threads) for number, own in found.stages.items()}
    found = replace(_overridden(found, provider, threads), stages=stages)
    return found if threads is None else replace(found, threads=threads)


def _overridden(found: Options, provider: str | None, threads: int | None) -> Options:
    """Session settings, or those of a stage, without what the options of the command line replace."""
    from llmconv.runtime.onnxruntime.session_settings import provider_name

    if threads is not None:
        attributes = {name: value for name, value in found.attributes.items() if name != "intra_op_num_threads"}
        found = replace(found, attributes=attributes)
    if provider is not None and provider_name(provider) != found.provider:
        found = replace(found, provider=provider_name(provider), provider_options={})
    return found
