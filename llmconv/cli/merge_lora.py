"""llmconv merge-lora: adapters merged into the weights of their base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options, plans

if TYPE_CHECKING:
    from llmconv.convert.lora import Merge


@click.command(name="merge-lora")
@click.argument("base")
@click.argument("adapters", nargs=-1, required=True, metavar="ADAPTER...")
@options.writes
@click.option(
    "--weight",
    "weights",
    type=float,
    multiple=True,
    help="Factor of an adapter's update; once per adapter [default: 1].",
)
@click.option(
    "--base-quant",
    type=click.Choice(["dequantize", "requantize"]),
    help="What becomes of a quantized BASE: plain weights (bfloat16 unless --dtype is given), or stored as it is, "
    "refused where too little of the update survives.",
)
@click.option("--alpha", type=float, help="lora_alpha, where the adapter's config does not carry it.")
def command(base: str, adapters: tuple[str, ...], as_json: bool, dry_run: bool, output: Path, **choices: Any) -> None:
    """Merge PEFT LoRA adapters into BASE and write the Hugging Face folder OUT.

    Several adapters are summed exactly, in one pass, with float32 arithmetic and one rounding. An adapter tensor that
    matches nothing in BASE is an error.

    \b
    llmconv merge-lora base adapter -o merged
    llmconv merge-lora base style facts -o merged --weight 0.7 --weight 1
    """
    from llmconv.convert.lora import merge_lora

    merge = merge_lora(base, adapters, output, dry_run=dry_run, **choices)
    if as_json:
        retention = {"retention": merge.retention.summary()} if merge.retention else {}
        options.print_json({**plans.as_result(merge.plan, output, dry_run), **_fates(merge), **retention})
        return
    counts = f"; {len(merge.merged)} merged, {len(merge.replaced)} replaced, {len(merge.added)} added"
    plans.print_plan(merge.plan, output, dry_run, counts, lambda name: _fate(merge, name))


def _fate(merge: Merge, name: str) -> str:
    fates = [
        fate
        for fate, names in (("added", merge.added), ("replaced", merge.replaced), ("merged", merge.merged))
        if name in names
    ]
    return " and ".join(fates) or "unchanged"


def _fates(merge: Merge) -> dict[str, Any]:
    return {
        "merged": list(merge.merged),
        "replaced": list(merge.replaced),
        "added": list(merge.added),
        "warnings": list(merge.warnings),
    }
