"""Options of the commands that continue texts: what runs, how tokens are picked, how prompts are worded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmconv.errors import UsageProblem

if TYPE_CHECKING:
    from llmconv.generation import TextModel
    from llmconv.runtime import SessionSettings

Command = TypeVar("Command", bound=Callable[..., Any])

BACKENDS = ["onnx", "torch", "genai"]

TEMPLATE = "Of chats: the tokenizer's, alpaca, v1_2, vicuna, or a file in Jinja."

PICKING = (
    click.option(
        "--max-new-tokens",
        type=click.IntRange(1),
        help="Maximum number of new tokens. Default: generation_config.json, else 64.",
    ),
    click.option("--max-length", type=click.IntRange(1), help="Maximum number of tokens, prompt included."),
    click.option("--temperature", type=click.FloatRange(0), help="Sampling temperature; 0 means greedy decoding."),
    click.option("--top-k", type=click.IntRange(0), help="Draw from the k likeliest; 0 for all, 50 if not said."),
    click.option(
        "--top-p", type=click.FloatRange(0, 1, min_open=True), help="Draw from the likeliest that sum up to p."
    ),
    click.option("--min-p", type=click.FloatRange(0, 1), help="Draw from those at least p times the likeliest."),
    click.option("--repetition-penalty", type=click.FloatRange(0, min_open=True), help="1 for none."),
    click.option("--num-beams", type=click.IntRange(1), help="Sequences searched side by side."),
    click.option("--stop", "stop_strings", multiple=True, metavar="STRING", help="Ends a text; may be repeated."),
    click.option("--seed", type=click.IntRange(0), help="Random seed for sampling."),
)
RUNNING = (
    click.option("--backend", type=click.Choice(BACKENDS), default="onnx", show_default=True, help="What runs."),
    click.option("--adapter", type=click.Path(path_type=Path), help="Folder of PEFT, with `--backend torch`."),
    click.option("--provider", metavar="NAME", help="Of onnxruntime: cpu, cuda, …; what it cannot run, the CPU runs."),
    click.option("--threads", type=click.IntRange(0), help="Of onnxruntime or torch; 0 for one per core."),
    click.option(
        "--session-config", type=click.Path(path_type=Path), metavar="FILE", help="Session options, .ini or JSON."
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="That a run of a small graph may take, 60 if not said; more weights and tokens may take more.",
    ),
    click.option("--prepack", is_flag=True, help="Copy weights into a faster layout; else they stay mapped files."),
)


def picking(command: Command) -> Command:
    """How the next token is picked, and when a text ends; what is not given is as generation_config.json says."""
    return _with(command, PICKING)


def running(command: Command) -> Command:
    """What runs, and on what."""
    return _with(command, RUNNING)


def _with(command: Command, decorators: tuple[Callable[[Command], Command], ...]) -> Command:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `GenerationSettings` from what `picking` took; how to draw is said by drawing."""
    fields = {name: given[name] for name in NAMES if given[name] is not None}
    if {"max_new_tokens", "max_length"} <= fields.keys():
        raise UsageProblem(
            "`--max-new-tokens` and `--max-length` both say when a text ends",
            hint="give one of them: `--max-length` counts the prompt, too",
        )
    if not fields.get("stop_strings"):
        fields.pop("stop_strings", None)
    if "temperature" in fields:
        fields["do_sample"] = fields["temperature"] > 0
    elif {"top_k", "top_p", "min_p"} & fields.keys():
        fields["do_sample"] = True
    return fields


NAMES = (
    "max_new_tokens",
    "max_length",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "num_beams",
    "stop_strings",
    "seed",
)


def opener(model: str, given: Mapping[str, Any]) -> Callable[[], TextModel]:
    """What opens a model as `running` and `--trust-remote-code` say; settings of onnxruntime are read at once.

    Args:
        model: a folder, a graph, or a name in the hub's cache.
        given: all that these options took; others beside them are left alone.
    """
    if given["backend"] == "torch":
        _refuse_session(given)
    settings = _session(given["provider"], given["threads"], given["session_config"], given["prepack"])
    settings = replace(settings, timeout=given["timeout"])

    def opened() -> TextModel:
        from llmconv.generation import TextModel

        return TextModel.open(model, settings=settings, **{name: given[name] for name in OPENING})

    return opened


def _refuse_session(given: Mapping[str, Any]) -> None:
    """Options of onnxruntime, which the eager model does without."""
    odd = next((name for name in ("provider", "session_config", "prepack") if given[name]), None)
    if odd:
        raise UsageProblem(
            f"`--{odd.replace('_', '-')}` is for onnxruntime, which `--backend torch` does without",
            hint="leave it out, the eager model runs on the CPU; or leave out `--backend torch`",
        )


OPENING = ("backend", "adapter", "trust_remote_code")
"""Options that `TextModel.open` takes as they are."""

OF_RUNNING = (*OPENING, "provider", "threads", "session_config", "prepack", "timeout")
"""All that `opener` takes."""


def _session(
    provider: str | None, threads: int | None, session_config: Path | None, prepack: bool = False
) -> SessionSettings:
    """Settings of onnxruntime from what `running` took; options go before the file."""
    from llmconv.runtime.onnxruntime.session_file import read_session_file
    from llmconv.runtime.onnxruntime.session_settings import SessionSettings, provider_name

    found = SessionSettings(prepack=prepack)
    if session_config:
        found = read_session_file(session_config, found)
    if threads is not None:
        attributes = {name: value for name, value in found.attributes.items() if name != "intra_op_num_threads"}
        found = replace(found, threads=threads, attributes=attributes)
    if provider is not None and provider_name(provider) != found.provider:
        found = replace(found, provider=provider_name(provider), provider_options={})
    return found
