"""`llmconv doctor`."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.errors import UnsupportedInput, listing


@click.command("doctor", cls=Command)
@options.as_json
@options.talk
def command(as_json: bool) -> None:
    """Show what this installation can do, and what is missing for what.

    Versions of all packages with the supported ranges, compiled modules, providers and devices, extras, free memory and
    disk. Add its output to a report of a bug.

    Exit code 3: a required package is missing, does not load, or is out of range.
    """
    from llmconv.doctor import diagnose, install_command

    findings = diagnose()
    problems = [one for one in findings if one.is_problem]
    if as_json:
        options.print_json({"ok": not problems, "findings": [asdict(one) for one in findings]})
    else:
        # a line for each finding, in columns, under the headings of their groups
        wide = max(len(one.name) for one in findings)
        for group, members in groupby(findings, lambda one: one.group):
            click.echo(group)
            for one in members:
                parts = (one.status.ljust(13), " ".join(filter(None, (one.found, f"({one.note})" * bool(one.note)))))
                click.echo(f"  {one.name.ljust(wide)}  {'  '.join(parts)}".rstrip())
    if problems:
        command = install_command(problems)
        hint = f"`{command}`" if command else "its line says why"
        names = listing(list(dict.fromkeys(one.name for one in problems)))
        raise UnsupportedInput(f"this installation does not work: {names}", hint=hint)
