"""llmconv serve: a model folder behind OpenAI's endpoints and a chat page."""

from __future__ import annotations

import json
from typing import Any

import click

from llmconv.cli import generation_options, options
from llmconv.progress import say, warn

API_KEY = "LLMCONV_API_KEY"
LOCAL = ("127.0.0.1", "::1", "localhost")


@click.command("serve")
@click.argument("model", metavar="FOLDER")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 for any free one.")
@click.option("--name", default="", help="Model name shown to clients. Default: the folder's name.")
@click.option("--parallel", type=click.IntRange(1), default=4, show_default=True, help="Answers that take turns.")
@click.option("--queue", type=click.IntRange(0), default=32, show_default=True, help="Further requests that may wait.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    help="Of answers to requests that set no limit; 2048 unless the model says.",
)
@click.option("--system", default="", metavar="TEXT", help="The message of the system, in chats that have none.")
@click.option("--template", default="tokenizer", show_default=True, metavar="NAME", help=generation_options.TEMPLATE)
@click.option(
    "--api-key",
    envvar=API_KEY,
    default="",
    help=f"Key that clients must send. Prefer the environment variable {API_KEY}.",
)
@click.option("--allow-host", "allow_hosts", multiple=True, help="Further name of this server; may be repeated.")
@click.option(
    "--allow-origin", "allow_origins", multiple=True, help="Site whose pages may ask, https://NAME; may be repeated."
)
@generation_options.running
@options.trust_remote_code
@click.option("--json", "as_json", is_flag=True, help="Address and model as one JSON object on stdout, when ready.")
@options.talk
def command(
    model: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Serve FOLDER on localhost: OpenAI's API under /v1, a chat page at /.

    Ends on Ctrl-C or SIGTERM; answers under way get three seconds.
    """
    from llmconv.serve import ServerSettings, serve

    others = generation_options.OF_RUNNING
    settings = ServerSettings(**{name: value for name, value in given.items() if name not in others})
    if settings.host not in LOCAL and not settings.api_key:
        warn(f"whoever reaches {settings.host} may use the model: give a key in {API_KEY}")
    opener = generation_options.opener(model, given)

    def on_ready(address: str, served: str) -> None:
        say(f"{address} is a chat page, {address}/v1 is OpenAI's API; Ctrl-C ends")
        if as_json:
            click.echo(json.dumps({"address": address, "model": served}))

    serve(opener, settings, on_ready)
