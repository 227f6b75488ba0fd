"""`llmconv merge-lora`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option

if TYPE_CHECKING:
    from llmconv.convert.merge import Merge


COMBINATIONS = ["linear", "cat", "svd", "magnitude_prune", "ties", "dare_linear", "dare_ties"]


@click.command(name="merge-lora", cls=Command)
@click.argument("base")
@click.argument("adapters", nargs=-1, required=True, metavar="ADAPTER...")
@options.writing
@options.shares
@option("--weight weights", "Weight of an adapter's update; once per adapter. [default: 1]", float, multiple=True)
@option(
    "--initial-adapter initial_adapters PATH",
    "The adapter before training, if its initial value was subtracted from the base (PiSSA, OLoRA); once per "
    "adapter, - for none.",
    multiple=True,
)
@option(
    "--combine", "How to combine several adapters; linear and cat are the exact sum.", COMBINATIONS, default="linear"
)
@option(
    "--density densities D",
    "Fraction of an adapter's update to keep, for ties, dare_* and magnitude_prune; once, or once per adapter.",
    float,
    multiple=True,
)
@option("--seed", "Random seed for dare_*.", int, show_default=True, default=0)
@option("--rank R", "Rank of the result of svd. [default: the largest rank]", int)
@option(
    "--majority-sign",
    "How ties and dare_ties elect signs: by magnitude or by count.",
    ["total", "frequency"],
    default="total",
)
@option(
    "--base-quant",
    "Result for a quantized BASE: dequantized (bfloat16 unless --dtype is given), or quantized again, refused if "
    "that loses too much of the update.",
    ["dequantize", "requantize"],
)
@option("--tokenizer PATH", "Tokenizer file or folder to use instead of BASE's.")
@option("--check", "Compare a sample of the written weights with the sum in float64.")
@option("--alpha", "lora_alpha, if the adapter's config does not contain it.", float)
def command(base: str, adapters: tuple[str, ...], as_json: bool, dry_run: bool, output: Path, **choices: Any) -> None:
    """Merge adapters into BASE and write the Hugging Face folder OUT.

    Adapters of PEFT (LoRA and twenty other kinds, see docs/merging.md), PaddleNLP,
    mlx-lm, torchtune, LitGPT, MindFormers or LLaMA2-Accessory, detected by their files. Several are summed in one
    pass, in float64 with one rounding, or combined by --combine. An adapter tensor that matches no weight of BASE is
    an error.

    Exit code 1: --check found a difference.
    """
    from llmconv.convert.merge import merge_lora

    merge = merge_lora(base, adapters, output, dry_run=dry_run, **choices)
    if as_json:
        named = {name: list(getattr(merge, name)) for name in ("merged", "replaced", "added", "warnings")}
        check = {"check": merge.check.as_result()} if merge.check else {}
        retention = {"retention": merge.retention.summary()} if merge.retention else {}
        options.print_json({**options.as_result(merge.plan, output, dry_run), **named, **retention, **check})
    else:
        counts = f"; tensors: {len(merge.merged)} merged, {len(merge.replaced)} replaced, {len(merge.added)} added"
        options.print_plan(merge.plan, output, dry_run, counts, lambda name: _fate(merge, name))
        if merge.check:
            click.echo("\n".join(merge.check.lines()))
    if merge.check and merge.check.differing:
        click.get_current_context().exit(1)


def _fate(merge: Merge, stored: str) -> str:
    name = merge.parts.get(stored, stored)
    return " and ".join(fate for fate in ("added", "replaced", "merged") if name in getattr(merge, fate)) or "unchanged"
