"""Options of the commands that open a model and let it write: what runs it, and how its text is picked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options

if TYPE_CHECKING:
    from llmconv.generation import TextModel

Decorator = Callable[[options.Command], options.Command]

SAMPLING: tuple[Any, ...] = (
    click.option("--max-new-tokens", type=click.IntRange(1), help="At most so many per answer."),
    click.option("--temperature", type=click.FloatRange(0), help="0 is greedy."),
    click.option("--top-k", type=click.IntRange(0), help="Keep the k likeliest; 0 for all."),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus."),
    click.option("--min-p", type=click.FloatRange(0, 1), help="Keep what is so much as likely as the likeliest."),
    click.option("--repetition-penalty", type=click.FloatRange(0, min_open=True), help="Of tokens already there."),
    click.option("--stop", multiple=True, help="Text that ends an answer; may be repeated."),
    click.option("--seed", type=click.IntRange(0), help="Of the sampling."),
)
RUNNING: tuple[Any, ...] = (
    click.option(
        "--backend", type=click.Choice(["onnx", "torch"]), default="onnx", show_default=True, help="What runs."
    ),
    click.option("--threads", type=click.IntRange(0), default=0, help="Of onnxruntime; 0 for one per core."),
    click.option("--template", default="tokenizer", show_default=True, help="Chat template."),
    options.trust_remote_code,
)


def sampling(command: options.Command) -> options.Command:
    """How the next token is picked; what is left out is as `generation_config.json` has it."""
    return _with(command, SAMPLING)


def running(command: options.Command) -> options.Command:
    """What runs the model."""
    return _with(command, RUNNING)


def _with(command: options.Command, wanted: tuple[Any, ...]) -> options.Command:
    for option in reversed(wanted):
        command = option(command)
    return command


def overrides(given: dict[str, Any]) -> dict[str, Any]:
    """The options of `sampling` as fields of `GenerationSettings`; a temperature means that tokens are drawn."""
    fields = {name: value for name, value in given.items() if name != "stop"}
    drawn = any(given[name] is not None for name in ("temperature", "top_k", "top_p", "min_p"))
    return {**fields, "stop_strings": given["stop"] or None, "do_sample": True if drawn else None}


def open_model(folder: Path, *, backend: str, threads: int, trust_remote_code: bool) -> TextModel:
    """The model behind FOLDER."""
    from llmconv.generation import TextModel
    from llmconv.runtime import SessionSettings

    return TextModel.open(
        folder, backend=backend, settings=SessionSettings(threads=threads), trust_remote_code=trust_remote_code
    )
