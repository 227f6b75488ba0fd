"""llmconv chat: a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmconv.cli import generation_options, options


@click.command("chat")
@click.argument("model", metavar="FOLDER")
@click.option("--system", default="", metavar="TEXT", help="The message of the system that the chat begins with.")
@click.option("--template", default="tokenizer", show_default=True, metavar="NAME", help=generation_options.TEMPLATE)
@generation_options.picking
@generation_options.running
@options.trust_remote_code
@click.option("--json", "as_json", is_flag=True, help="One JSON object per answer on stdout.")
@options.talk
def command(
    model: str,
    system: str,
    template: str,
    backend: str,
    adapter: Path | None,
    provider: str | None,
    threads: int | None,
    session_config: Path | None,
    prepack: bool,
    trust_remote_code: bool,
    as_json: bool,
    **picking: Any,
) -> None:
    """Talk with the model in FOLDER.

    A line is a message: on a terminal after a prompt, else every line of stdin. Only what is new runs through the
    model. /reset forgets the chat, /system TEXT sets the system message, /quit or Ctrl-D ends, Ctrl-C stops an answer.
    """
    from llmconv.cli.terminal import talk
    from llmconv.generation import TextModel
    from llmconv.generation.chat import Chat, answer_settings

    session = generation_options.session(provider, threads, session_config, prepack)
    opened = TextModel.open(
        model, backend=backend, settings=session, adapter=adapter, trust_remote_code=trust_remote_code
    )
    settings = answer_settings(opened.defaults, template, **generation_options.settings(picking))
    talk(Chat(opened, settings, template=template, system=system), opened.folder.resolve().name, as_json)
