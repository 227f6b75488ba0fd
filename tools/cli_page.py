"""Write docs/cli.md from the commands' own help; with --check, only report whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from llmconv.cli import main as llmconv

PAGE = Path("docs/cli.md")
WIDTH = 100

TOP = """\
# The command line

Written by `make docs` from the commands themselves; `make check` compares.
"""


def main() -> int:
    """Writes the page, or compares it; returns 1 if it differs."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"error: {PAGE} does not match the help of the commands\n\nhint: run `make docs`", file=sys.stderr)
        return 1
    return 0


def page() -> str:
    """The whole page: the group, then each command in the order of the work."""
    return "\n".join([TOP, *sections(context(llmconv, "llmconv"), llmconv)])


def context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    """The context of a command, at a fixed width."""
    settings: dict[str, Any] = {**command.context_settings, "max_content_width": WIDTH, "terminal_width": WIDTH}
    return click.Context(command, parent, name, **settings)


def sections(around: click.Context, command: click.Command) -> list[str]:
    """One section per command, and below it those of its own commands."""
    parts = [f"## {around.command_path}\n\n```text\n{command.get_help(around)}\n```\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(around):
            below = command.get_command(around, name)
            if below is None:
                raise LookupError(f"llmconv lists the command {name}, but has none")
            parts += sections(context(below, name, around), below)
    return parts


if __name__ == "__main__":
    sys.exit(main())
