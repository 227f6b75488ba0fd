"""`llmconv families`."""

from __future__ import annotations

import click

from llmconv.cli import options


@click.command("families")
@options.as_json
@options.talk
def command(as_json: bool) -> None:
    """List the model families that export supports (the registry of input maps)."""
    from llmconv.export.families import known_input_maps

    rows = {name: row for name, row in sorted(known_input_maps().items())}
    if as_json:
        options.print_json({name: {"position_ids": row.position_ids, "note": row.note} for name, row in rows.items()})
        return
    width = max(map(len, rows))
    for name, row in rows.items():
        click.echo(
            f"{name:{width}}  {'position_ids' if row.position_ids else 'no position_ids':16}  {row.note}".rstrip()
        )
