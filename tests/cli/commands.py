"""The commands, by the words that name them."""

from __future__ import annotations

from pathlib import Path

import click

import llmconv
import llmconv.cli
import llmconv.convert
import llmconv.embedding
import llmconv.export
import llmconv.generation
import llmconv.push
import llmconv.verify

ROOT = Path(__file__).parents[2]
CHECKPOINT = str(ROOT / "examples/tiny-llama/ep4-ba2400-rank0.pt")


def command(path: str) -> click.Command:
    """One command of llmconv, such as `export`, or one of a group, such as `delta apply`."""
    found: click.Command | None = llmconv.cli.main
    for name in path.split():
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), name)
    assert found is not None
    return found


def paths(name: str) -> list[str]:
    """A command, or those of a group."""
    found = command(name)
    return [f"{name} {below}" for below in found.commands] if isinstance(found, click.Group) else [name]


LEAVES = [path for name in llmconv.cli.main.commands for path in paths(name)]
"""Every command that is not a group."""
