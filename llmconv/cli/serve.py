"""`llmconv serve`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import click
from click.core import ParameterSource

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option
from llmconv.errors import UsageProblem
from llmconv.progress import say, warn

API_KEY = "LLMCONV_API_KEY"
# options without effect on a model with embeddings
OF_TEXTS = (
    *("max_new_tokens", "system", "template", "tool_parser", "reasoning_parser", "backend", "first_export", "decode"),
    *("tokenizer", "adapters", "prefix_tuning", "speculate", "form", "device", "dtype", "stage_at", "stage_timeout"),
    "trust_remote_code",
)
LOCAL = ("127.0.0.1", "::1", "localhost")


def refuse_given(names: Sequence[str]) -> None:
    """Raises UsageProblem for options that were given, and have no effect."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP):
            written = next(one.opts[0] for one in context.command.params if one.name == name)
            problem = f"`{written}` has no effect: the graphs of this folder have embeddings"
            raise UsageProblem(problem, hint="leave it out")


@click.command("serve", cls=Command)
@click.argument("model", metavar="FOLDER")
@option("--host", "Address to listen on.", str, default="127.0.0.1")
@option("--port", "0 for any free port.", click.IntRange(0, 65535), show_default=True, default=8000)
@option("--name", "Model name shown to clients. Default: the folder's name, or the Hub's `org/name`.", str, default="")
@option("--parallel", "Answers generated at a time.", click.IntRange(1), show_default=True, default=16)
@option("--queue", "Further requests that wait.", click.IntRange(0), show_default=True, default=32)
@option(
    "--max-new-tokens",
    "Maximum number of new tokens if the request sets none. Default: generation_config.json, else 2048.",
    click.IntRange(1),
)
@option("--system TEXT", "System message for chats that have none.", default="")
@options.template
@option(
    "--tool-parser NAME",
    "How the model writes calls of tools, see docs/serving.md. Default: as the chat template tells.",
    str,
    default="",
)
@option(
    "--reasoning-parser/--no-reasoning-parser",
    "Whether reasoning (`<think>` and the like) goes into `reasoning_content`.  [default: yes]",
    default=True,
)
@option(
    "--api-key",
    f"Key that clients must send. Prefer the environment variable {API_KEY}.",
    str,
    envvar=API_KEY,
    default="",
)
@option("--allow-host allow_hosts", "Host name of this server. May be repeated.", str, multiple=True)
@option(
    "--allow-origin allow_origins", "Site that may send requests, https://NAME. May be repeated.", str, multiple=True
)
@option("--log-prompts", "Write the text of each request into the log, too.")
@options.running_adapters
@options.trust_remote_code
@option("--json as_json", "Print address and model as one JSON object when ready.")
@options.talk
def command(model: str, as_json: bool, **given: Any) -> None:
    """Serve FOLDER on localhost: OpenAI's API under /v1, a chat page at /.

    A folder of `export --task embed` has /v1/embeddings alone.

    Stops on Ctrl-C or SIGTERM; running answers get three more seconds.
    """
    from llmconv.embedding import Embedder, embeds
    from llmconv.generation.generate import opener
    from llmconv.runtime.onnxruntime.session_file import session_settings
    from llmconv.serve import ServerSettings, serve

    is_embedder = embeds(model)
    if is_embedder:
        refuse_given(OF_TEXTS)
    given["adapter"], adapters = options.adapters_of(given.pop("adapters"))
    if not given["name"] and (repository := options.repository_of(model)):
        given["name"] = repository
    model = options.with_graphs(model, given) if not adapters and not is_embedder else model
    given.pop("first_export", None)
    settings = ServerSettings(**options.without_running(given), adapters=adapters)
    if settings.host not in LOCAL and not settings.api_key:
        warn(f"anyone who can reach {settings.host} can use the model: set an API key in {API_KEY}")

    def on_ready(address: str, served: str) -> None:
        say(f"{address} is a chat page, {address}/v1 is OpenAI's API; Ctrl-C stops")
        if as_json:
            click.echo(json.dumps({"address": address, "model": served}))

    session = cast(Any, given)
    serve(
        (lambda: Embedder(model, session_settings(session))) if is_embedder else opener(model, session),
        settings,
        on_ready,
    )
