"""llmconv chat: a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmconv.cli import model_options, options


@click.command("chat")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--system", default="", help="What the model is told first.")
@model_options.sampling
@model_options.running
@options.talk
def command(
    folder: Path, system: str, backend: str, threads: int, template: str, trust_remote_code: bool, **given: Any
) -> None:
    """Talk with the model in FOLDER.

    A line is a message: on a terminal after a prompt, else every line of stdin. Only what is new runs through the
    model. /reset forgets the chat, /system TEXT sets the system message, /quit or Ctrl-D ends, Ctrl-C stops an answer.
    """
    from llmconv.cli.terminal import talk
    from llmconv.generation.chat import Chat, answer_settings

    model = model_options.open_model(folder, backend=backend, threads=threads, trust_remote_code=trust_remote_code)
    settings = answer_settings(model.defaults, **model_options.overrides(given))
    talk(Chat(model, settings, template=template, system=system), folder.resolve().name)
