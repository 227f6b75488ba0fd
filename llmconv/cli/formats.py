"""llmconv formats: the training formats that to-hf reads."""

from __future__ import annotations

import click

from llmconv.cli import options


@click.command(name="formats")
@options.as_json
@options.talk
def command(as_json: bool) -> None:
    """List the training formats that `to-hf` reads."""
    from llmconv.convert.formats import formats

    if as_json:
        options.print_json({name: found.title for name, found in formats().items()})
        return
    width = max(len(name) for name in formats())
    for name, found in formats().items():
        click.echo(f"{name:<{width}}  {found.title}")
