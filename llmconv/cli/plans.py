"""Output of the commands that write a folder: one line, the whole plan, or one JSON object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.errors import printable

if TYPE_CHECKING:
    from llmconv.output.plan import Plan


def as_result(plan: Plan, output: Path, dry_run: bool) -> dict[str, Any]:
    """The fields that all these commands have in their JSON."""
    return {
        "model_type": plan.checkpoint.config.get("model_type"),
        "output": str(output),
        "tensors": sum(len(shard.tensors) for shard in plan.shards),
        "bytes": plan.nbytes,
        "files": [shard.name for shard in plan.shards],
        "copied": [shard.name for shard in plan.shards if shard.copy_of],
        "written": not dry_run and not plan.found,
        **({"part": plan.part} if plan.part else {}),
    }


def print_plan(
    plan: Plan, output: Path, dry_run: bool, more: str = "", fate: Callable[[str], str] | None = None
) -> None:
    """Prints one line about the written folder, ending with `more`; in a dry run also every tensor with its `fate`."""
    from llmconv.output.writer import space_needed

    count = sum(len(shard.tensors) for shard in plan.shards)
    copied = sum(shard.nbytes for shard in plan.shards if shard.copy_of)
    sizes = f"{count} tensors, {plan.nbytes:,} bytes in {len(plan.shards)} file(s)"
    sizes += f", {copied:,} of them copied unchanged" if copied else ""
    verb = "would write" if dry_run else "found" if plan.found else "wrote"
    verb += f" part {plan.part} of" if plan.part else ""
    click.echo(f"{verb} {output}: {printable(plan.checkpoint.kind)}, {sizes}{more}")
    if not dry_run:
        return
    click.echo(f"disk needed: {space_needed(plan, output):,} bytes")
    for shard in plan.shards:
        made = f"to copy from {shard.copy_of.name}" if shard.copy_of else "to write"
        click.echo(f"  {shard.name}  {made}  {len(shard.tensors)} tensors  {shard.nbytes:,} bytes")
        for name, tensor in shard.tensors.items():
            place = f"{shard.name}  " if len(plan.shards) > 1 else ""
            click.echo(
                f"  {place}{name}  {tensor.dtype.name}  {list(tensor.shape)}" + (f"  {fate(name)}" if fate else "")
            )
