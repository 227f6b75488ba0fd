"""`llmconv serve`."""

from __future__ import annotations

import json
from typing import Any

import click

from llmconv.cli import generation_options, options
from llmconv.cli.help_page import Command
from llmconv.progress import say, warn

API_KEY = "LLMCONV_API_KEY"
LOCAL = ("127.0.0.1", "::1", "localhost")


@click.command("serve", cls=Command)
@click.argument("model", metavar="FOLDER")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 for any free port.")
@click.option("--name", default="", help="Model name shown to clients. Default: the folder's name.")
@click.option("--parallel", type=click.IntRange(1), default=4, show_default=True, help="Answers generated at a time.")
@click.option("--queue", type=click.IntRange(0), default=32, show_default=True, help="Further requests that wait.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    help="Maximum number of new tokens if the request sets none. Default: generation_config.json, else 2048.",
)
@click.option("--system", default="", metavar="TEXT", help="System message for chats that have none.")
@generation_options.template
@click.option(
    "--api-key",
    envvar=API_KEY,
    default="",
    help=f"Key that clients must send. Prefer the environment variable {API_KEY}.",
)
@click.option("--allow-host", "allow_hosts", multiple=True, help="Host name of this server. May be repeated.")
@click.option(
    "--allow-origin", "allow_origins", multiple=True, help="Site that may send requests, https://NAME. May be repeated."
)
@generation_options.running
@options.trust_remote_code
@click.option("--json", "as_json", is_flag=True, help="Print address and model as one JSON object when ready.")
@options.talk
def command(model: str, as_json: bool, **given: Any) -> None:
    """Serve FOLDER on localhost: OpenAI's API under /v1, a chat page at /.

    Stops on Ctrl-C or SIGTERM; running answers get three more seconds.
    """
    from llmconv.serve import ServerSettings, serve

    model = generation_options.with_graphs(model, given)
    settings = ServerSettings(**generation_options.without_running(given))
    if settings.host not in LOCAL and not settings.api_key:
        warn(f"anyone who can reach {settings.host} can use the model: set an API key in {API_KEY}")
    opener = generation_options.opener(model, given)

    def on_ready(address: str, served: str) -> None:
        say(f"{address} is a chat page, {address}/v1 is OpenAI's API; Ctrl-C stops")
        if as_json:
            click.echo(json.dumps({"address": address, "model": served}))

    serve(opener, settings, on_ready)
