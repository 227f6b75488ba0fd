"""`llmconv families`."""

from __future__ import annotations

import sys
from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.progress import say


@click.command("families", cls=Command)
@options.as_json
@options.talk
def command(as_json: bool) -> None:
    """List the model families that export supports (the registry of input maps).

    In a terminal, types of transformers that are not exported follow on stderr, with the reason; in a pipe, only their
    number. With --json they are those with a `not_exported`.
    """
    from llmconv.export.families import NOT_EXPORTED, known_input_maps
    from llmconv.export.input_map import InputMap
    from llmconv.runtime.extra_inputs import POSITIONS
    from llmconv.runtime.images.families import IMAGE_FAMILIES

    own = dict.fromkeys(IMAGE_FAMILIES, InputMap(note="by the type of its language model; images by vision.onnx"))
    rows = dict(sorted({**own, **known_input_maps()}.items()))
    others = {name: reason for name, reason in sorted(NOT_EXPORTED.items()) if name not in rows}
    if as_json:
        found: dict[str, Any] = {name: {"not_exported": reason} for name, reason in others.items()}
        for name, row in rows.items():
            extras = [extra.name for extra in row.extras]
            found[name] = {"position_ids": row.heeds_positions, "extras": extras, "note": row.note}
        options.print_json(found)
        return
    width = max(map(len, rows))
    for name, row in rows.items():
        extras = [extra.name for extra in row.extras if extra.name != POSITIONS]
        note = "; ".join(filter(None, (f"inputs: {', '.join(extras)}" if extras else "", row.note)))
        click.echo(
            f"{name:{width}}  {'position_ids' if row.heeds_positions else 'no position_ids':16}  {note}".rstrip()
        )
    sys.stdout.flush()  # the reader may have left, and then nothing more is said
    if not sys.stdout.isatty():
        say(f"{len(others)} types of transformers are not exported; `llmconv families --json` has the reasons")
        return
    for name, reason in others.items():
        say(f"not exported: {name}: {reason}")
