"""`llmconv quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option

SCHEMES = ["fp8-dynamic", "fp8-block", "w8a8", "w4a16", "w4a16-asym", "nvfp4a16", "mxfp4", "mxfp4a16"]


@click.command(name="quantize", cls=Command)
@click.argument("model")
@options.output
@options.shares
@option(
    "--scheme",
    "FP8 by channel or in 128×128 blocks, or int8 by channel, each with dynamic activations; int4 in groups, or with "
    "zero points; NVFP4 of weights; MXFP4, or of weights alone.",
    SCHEMES,
    required=True,
)
@option("--adapter adapters PATH", "Adapter to merge first, as merge-lora does. May be repeated.", multiple=True)
@option(
    "--quant-block N",
    "Columns that share a scale, of w4a16 and w4a16-asym: 16, 32, 64, 128 or 256.  [default: 128]",
    int,
)
@option("--quant-exclude PATTERN", "Weights that stay as they are; may be repeated.", multiple=True)
@option(
    "--method",
    "Of w4a16 and w4a16-asym; search: the scales with the least squared error; rtn: from the extreme values; gptq: as "
    "search, and later columns make up for the errors of earlier ones on the text of --calibrate; awq: as search, with "
    "norms and the matrices behind them scaled so that this text loses least.  [default: rtn, with --calibrate search]",
    ["rtn", "search", "gptq", "awq"],
)
@option(
    "--calibrate FILE|default",
    "Text that shows which columns of weights matter, of the same schemes, so that rounding costs less; `default`: "
    "llmconv's own.",
)
@option(
    "--base-format",
    "Write w4a16 in the form of AutoAWQ or GPTQ (w4a16-asym: of AutoAWQ), for engines that read no other.",
    ["awq", "gptq"],
)
@options.dtype
@options.max_shard_size
@options.overwrite
@options.resume
@options.dry_run
@options.as_json
@options.talk
def command(model: str, as_json: bool, dry_run: bool, output: Path, **choices: Any) -> None:
    """Write a folder of MODEL with quantized weights, for vLLM and SGLang.

    MODEL is a Hugging Face folder, or a training checkpoint as for to-hf. OUT has the form of compressed-tensors.
    Weights are rounded block of rows by block of rows: no GPU and no memory for the model are needed, and a text only
    for --method gptq and awq.
    Routers, heads, embeddings, norms, and towers of images and sound stay as they are. `verify OUT --reference MODEL`
    checks every code and scale.
    """
    from llmconv.compressed import quantize

    made = quantize(model, output, dry_run=dry_run, **choices)
    if as_json:
        named = {"scheme": made.scheme, "quantized": list(made.weights), "ignore": list(made.ignore)}
        options.print_json({**options.as_result(made.plan, output, dry_run), **named, "warnings": list(made.warnings)})
    else:
        counts = f"; {len(made.weights)} weights as {made.scheme}, {len(made.ignore)} module(s) kept"
        stems = {name.removesuffix("weight") for name in made.weights}
        options.print_plan(made.plan, output, dry_run, counts, lambda name: _fate(name, stems))


def _fate(name: str, stems: set[str]) -> str:
    stem = name[: name.rfind(".") + 1]
    if name.removesuffix("_blocks").removesuffix("_scales") in stems:  # stacks of experts
        return "quantized"
    return "quantized" if stem in stems and not name.endswith(".bias") else "kept"
