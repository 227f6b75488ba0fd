"""`llmconv serve-stage`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option
from llmconv.progress import say


@click.command("serve-stage", cls=Command)
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@option("--stage number I", "Which stage, from 1.", click.IntRange(1), required=True)
@option("--listen HOST:PORT", "Address to listen on; port 0 for any free one.", default="127.0.0.1:7700")
@options.session
@option("--json as_json", "Print the address as one JSON object when ready.")
@options.talk
def command(folder: Path, number: int, listen: str, as_json: bool, **given: Any) -> None:
    """Run one stage of the graphs in FOLDER for models on other hosts.

    The graphs are those of `llmconv export --stages K`. FOLDER needs llmconv.json, the graphs of the stage, and the
    weights that they map. `llmconv generate`, `chat` and `serve` use the stage with `--stage-at HOST:PORT`. Stops on
    Ctrl-C or SIGTERM.

    Connections are neither authenticated nor encrypted: use a private network or an SSH tunnel. If the environment
    variable LLMCONV_STAGE_TOKEN is set, clients must have the same one.
    """
    from llmconv.runtime.onnxruntime.session_file import session_settings
    from llmconv.runtime.stages.staged_runner import serve_stage

    def on_ready(address: str, count: int) -> None:
        say(f"stage {number} of {count} listens on {address}; Ctrl-C stops")
        if as_json:
            click.echo(json.dumps({"address": address, "stage": number, "stages": count}))

    serve_stage(folder, number, listen, session_settings(cast(Any, given)), on_ready)
