"""`llmconv delta apply` and `llmconv delta extract`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command, Group
from llmconv.cli.options import option

if TYPE_CHECKING:
    from llmconv.convert.delta import Extracted


@click.group(name="delta", cls=Group)
def command() -> None:
    """Apply or extract the difference between a tuned model and its base."""


@command.command(name="apply", cls=Command)
@click.argument("base")
@click.argument("delta")
@options.writing
@option(
    "--new-rows",
    "What rows of new tokens are added to: the mean of the base's rows (Stanford Alpaca) or zeros (FastChat).  "
    "[default: as the delta tells]",
    click.Choice(["mean", "zeros"]),
)
def apply(base: str, delta: str, as_json: bool, dry_run: bool, output: Path, **choices: Any) -> None:
    """Add DELTA to BASE and write the tuned model to OUT.

    BASE is a Hugging Face folder, or a checkpoint that to-hf reads. The kind of DELTA is detected by its content:
    from `delta extract`, which restores the tuned model bit for bit and refuses any other base; from FastChat (Vicuna)
    or Stanford Alpaca, a Hugging Face folder of tuned - base, whose vocabulary may be larger; or from LLaMA2-Accessory.
    The last two are added in float32 and rounded once to --dtype; with `keep` that is the base's type, or the delta's
    if that has more bits. If the delta has a checksum, it is compared, and a mismatch is reported.
    """
    from llmconv.convert.delta import apply_delta

    done = apply_delta(base, delta, output, dry_run=dry_run, **choices)
    if as_json:
        options.print_json({"kind": done.kind, **options.as_result(done.plan, output, dry_run)})
    else:
        options.print_plan(done.plan, output, dry_run, f"; base + {done.kind} delta")


@command.command(name="extract", cls=Command)
@click.argument("base")
@click.argument("tuned")
@partial(options.writing, shard_size=options.max_shard_size)
@option("--rank", "Write a LoRA adapter of this rank instead, an approximation.", click.IntRange(1))
@option("--to FORMAT", "Write the delta of another tool: accessory, alpaca or fastchat.", shell_complete=options.deltas)
@option("--shards", "Number of model-parallel parts (accessory).  [default: as BASE]", click.IntRange(1))
def extract(base: str, tuned: str, as_json: bool, dry_run: bool, output: Path, **choices: Any) -> None:
    """Write the difference between TUNED and BASE to the folder OUT.

    The delta is exact: for each weight it stores the integer difference of the bit patterns (also for NaN, infinities,
    other types and new rows), compressed with zstd. `delta apply` restores TUNED bit for bit, with its config and
    tokenizer. OUT contains the sha256 of the base's tensors.

    With --rank, OUT is a LoRA adapter for PEFT or merge-lora: for each changed linear weight the best product of that
    rank (nearly the best for large weights); norms, biases, embeddings and routers are stored in full. Changes that
    PEFT cannot store, such as experts, are refused by name. Prints the captured share of each change.

    With --to, OUT is a delta for another tool: FastChat's apply_delta (float16), Stanford Alpaca's weight_diff.py
    (float32), or LLaMA2-Accessory's weight_operate.py (float16, over Meta's shards). Reports how many elements that
    tool does not restore, since it rounds, and in which tensors.
    """
    from llmconv.convert.delta import extract_delta

    done = extract_delta(base, tuned, output, dry_run=dry_run, **choices)
    if as_json:
        options.print_json({**options.as_result(done.plan, output, dry_run), **_delta_fields(done)})
        return
    size = f"; {done.nbytes:,} bytes as {done.kind} delta" if done.nbytes is not None else f" as {done.kind} delta"
    options.print_plan(done.plan, output, dry_run, size)
    for name, share in done.captured.items():
        click.echo(f"  {share:7.2%}  {name}")
    if done.captured_overall is not None:
        click.echo(f"  {done.captured_overall:7.2%}  of the norm of all {len(done.captured)} changes")
    if done.inexact is not None:
        click.echo(f"  {done.elements - done.inexact:,} of {done.elements:,} elements are restored to the bit")


def _delta_fields(done: Extracted) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": done.kind, "delta_bytes": done.nbytes}
    if done.elements:
        counts = {"elements": done.elements, "inexact": done.inexact}
        return {**fields, **counts, "inexact_tensors": dict(done.inexact_tensors)}
    low_rank = {"captured": dict(done.captured), "captured_overall": done.captured_overall, "whole": list(done.whole)}
    return {**fields, **(low_rank if done.kind == "low-rank" else {})}
