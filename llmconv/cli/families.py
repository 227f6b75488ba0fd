"""`llmconv families`."""

from __future__ import annotations

import click

from llmconv.cli import options
from llmconv.progress import say


@click.command("families")
@options.as_json
@options.talk
def command(as_json: bool) -> None:
    """List the model families that export supports (the registry of input maps).

    Types of transformers that are not exported follow on stderr, with the reason; with --json they are those with a
    `not_exported`.
    """
    from llmconv.export.families import known_input_maps
    from llmconv.export.families_not_exported import NOT_EXPORTED

    rows = {name: row for name, row in sorted(known_input_maps().items())}
    others = {name: reason for name, reason in sorted(NOT_EXPORTED.items()) if name not in rows}
    if as_json:
        found = {name: {"position_ids": row.position_ids, "note": row.note} for name, row in rows.items()}
        options.print_json({**found, **{name: {"not_exported": reason} for name, reason in others.items()}})
        return
    width = max(map(len, rows))
    for name, row in rows.items():
        click.echo(
            f"{name:{width}}  {'position_ids' if row.position_ids else 'no position_ids':16}  {row.note}".rstrip()
        )
    for name, reason in others.items():
        say(f"not exported: {name}: {reason}")
