"""Options of the commands that generate text: backend and session, sampling, chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from llmconv.cli import options
from llmconv.cli.options import ElementType
from llmconv.errors import UsageProblem

if TYPE_CHECKING:
    from llmconv.generation import TextModel
    from llmconv.generation.generate import RunningOptions
    from llmconv.runtime import SessionSettings

Command = TypeVar("Command", bound=Callable[..., Any])
BACKENDS = ["onnx", "torch", "genai"]

template = click.option(
    "--template",
    default="tokenizer",
    show_default=True,
    metavar="NAME",
    shell_complete=options.templates,
    help="Chat template: tokenizer (its own), alpaca, v1_2, vicuna, or a Jinja file.",
)

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
        "--export/--no-export",
        "first_export",
        default=True,
        help="Whether a folder without graphs is exported once, into ~/.cache/llmconv, which links its weights, and a "
        "training checkpoint converted there before.  "
        "[default: yes]",
    ),
    click.option(
        "--decode", type=click.Path(path_type=Path), metavar="FILE", help="Decode graph, for a prefill graph."
    ),
    click.option("--tokenizer", metavar="PATH", help="Folder of another tokenizer.  [default: the model's]"),
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
    return _with(command, SESSION)


def _with(command: Command, decorators: tuple[Callable[[Command], Command], ...]) -> Command:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options without those that were left out; sampling options turn on `do_sample`."""
    fields = {name: value for name, value in given.items() if value is not None}
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


def without_running(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `opener` does not use."""
    return {name: value for name, value in given.items() if name not in OF_RUNNING}


def with_graphs(model: str, given: dict[str, Any]) -> str:
    """The model, or the folder in the cache with its graphs; takes `first_export` out of the options."""
    wanted = given.pop("first_export")
    others = ("decode", "adapter", "prefix_tuning", "stage_at", "trust_remote_code")
    if not wanted or given["backend"] != "onnx" or any(given[name] for name in others) or not Path(model).exists():
        return model
    from llmconv.generation.first_export import graphs_in_cache

    made = graphs_in_cache(Path(model))
    return str(made) if made else model


def opener(model: str, given: Mapping[str, Any]) -> Callable[[], TextModel]:
    """A function that opens a folder, a graph, or a name in the Hub's cache; the session options are read at once.

    Of `given`, options other than those of `running` and `--trust-remote-code` are ignored.
    """
    from llmconv.generation.generate import opener

    return opener(model, running_options(given))


def session_settings(given: Mapping[str, Any]) -> SessionSettings:
    """Session settings from the options of `session`; others are ignored."""
    from llmconv.runtime.onnxruntime.session_file import session_settings

    return session_settings(running_options(given))


def running_options(given: Mapping[str, Any]) -> RunningOptions:
    return cast("RunningOptions", {name: value for name, value in given.items() if name in OF_RUNNING})


OF_RUNNING = (
    *("backend", "decode", "tokenizer", "adapter", "prefix_tuning", "device", "dtype", "trust_remote_code"),
    *("provider", "threads", "session_config", "timeout", "prepack", "packed_cache", "stage_at", "stage_timeout"),
)
"""All options that `opener` uses."""
