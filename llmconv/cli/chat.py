"""`llmconv chat`."""

from __future__ import annotations

from typing import Any

import click

from llmconv.cli import generation_options, options
from llmconv.cli.help_page import Command


@click.command("chat", cls=Command)
@click.argument("model", metavar="FOLDER")
@click.option("--system", default="", metavar="TEXT", help="System message at the start of the chat.")
@generation_options.template
@generation_options.picking
@generation_options.running
@options.trust_remote_code
@click.option("--json", "as_json", is_flag=True, help="One JSON object per answer on stdout.")
@options.talk
def command(model: str, system: str, template: str, as_json: bool, **given: Any) -> None:
    """Chat with the model in FOLDER.

    Each line is a message: typed at the prompt of a terminal, or read from stdin. Each turn runs only the new tokens.
    /reset clears the chat, /system TEXT sets the system message, /quit or Ctrl-D exits, Ctrl-C stops an answer.
    """
    from llmconv.cli.terminal import talk
    from llmconv.generation.chat_session import Chat, answer_settings

    opened = generation_options.opener(generation_options.with_graphs(model, given), given)()
    picked = generation_options.settings(generation_options.without_running(given))
    settings = answer_settings(opened.defaults, template, **picked)
    talk(Chat(opened, settings, template=template, system=system), opened.folder.resolve().name, as_json)
