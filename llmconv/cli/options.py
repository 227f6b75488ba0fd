"""Options with the same spelling in every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from llmconv.progress import set_quiet

Command = TypeVar("Command", bound=Callable[..., Any])

VERBOSE = "llmconv.verbose"
"""Where a command leaves `-v` for the group, in click's `Context.meta`."""

output = click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to make.")
dtype = click.option(
    "--dtype",
    type=click.Choice(["keep", "float32", "float16", "bfloat16"]),
    default="keep",
    show_default=True,
    help="Element type of the floating-point weights.",
)
max_shard_size = click.option(
    "--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Largest safetensors file."
)
kept_shard_size = click.option(
    "--max-shard-size",
    default="keep",
    show_default=True,
    metavar="SIZE",
    help="Largest safetensors file; keep: the files of BASE, which are copied where nothing in them changes.",
)
overwrite = click.option("--overwrite", is_flag=True, help="Replace OUT if llmconv made it.")
resume = click.option("--resume", is_flag=True, help="Continue a run that was interrupted.")
trust_remote_code = click.option(
    "--trust-remote-code", is_flag=True, help="Run the Python code in the model's folder: only if you have read it."
)
dry_run = click.option("--dry-run", is_flag=True, help="Print the plan (tensors, bytes, disk needed) and stop.")
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


def talk(command: Command) -> Command:
    """`-q` and `-v`."""

    def quieten(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        set_quiet(value)

    def explain(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta[VERBOSE] = value

    quiet = click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        callback=quieten,
        help="Hide messages and progress bars (stderr).",
    )
    verbose = click.option(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=explain, help="Show the traceback of an error."
    )
    return quiet(verbose(command))


def writes(command: Command) -> Command:
    """The options of every command that writes a folder."""
    return _with(command, max_shard_size)


def changes(command: Command) -> Command:
    """The options of every command that writes a changed model folder."""
    return _with(command, kept_shard_size)


def _with(command: Command, shard_size: Callable[[Command], Command]) -> Command:
    for option in (talk, as_json, dry_run, resume, overwrite, shard_size, dtype, output):
        command = option(command)
    return command


def print_json(content: dict[str, Any]) -> None:
    """The command's result as one JSON object on stdout."""
    click.echo(json.dumps(content, indent=2))
