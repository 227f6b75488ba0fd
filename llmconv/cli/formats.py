"""`llmconv formats`."""

from __future__ import annotations

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command


@click.command(name="formats", cls=Command)
@options.as_json
@options.talk
def command(as_json: bool) -> None:
    """List the training formats that `to-hf` reads."""
    from llmconv.convert.formats import formats

    rows = {
        name: {"title": found.title, "covers": found.covers, "from_hf": bool(found.save)}
        for name, found in formats().items()
    }
    if as_json:
        options.print_json(rows)
        return
    width = max(len(name) for name in rows)
    for name, row in rows.items():
        click.echo(f"{name:<{width}}  {row['title']}{'; from-hf writes it' if row['from_hf'] else ''}")
        if row["covers"]:
            click.echo(f"{'':<{width}}  {row['covers']}")
