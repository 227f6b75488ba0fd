"""`llmconv families`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options

if TYPE_CHECKING:
    from llmconv.export.families import InputMap


@click.command("families")
@options.as_json
@options.talk
def command(as_json: bool) -> None:
    """List the model families that export supports (the registry of input maps)."""
    from llmconv.export.families import known_input_maps

    rows = {name: row for name, row in sorted(known_input_maps().items())}
    if as_json:
        options.print_json({name: _fields(row) for name, row in rows.items()})
        return
    width = max(map(len, rows))
    for name, row in rows.items():
        extras = f"inputs: {', '.join(extra.name for extra in row.extras)}" if row.extras else ""
        note = "; ".join(filter(None, (extras, row.note)))
        click.echo(f"{name:{width}}  {'position_ids' if row.position_ids else 'no position_ids':16}  {note}".rstrip())


def _fields(row: InputMap) -> dict[str, Any]:
    """A row for JSON."""
    extras = [extra.name for extra in row.extras]
    return {"position_ids": row.position_ids, "extras": extras, "note": row.note}
