"""`llmconv to-hf`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option


@click.command(name="to-hf", cls=Command)
@click.argument("source")
@partial(options.writing, shard_size=options.asked_shard_size)
@options.shares
@option("--from format FORMAT", "Training format. [default: detected by content]")
@option(
    "--config PATH",
    "JSON or YAML file with configuration fields to add. May be repeated; later ones win.",
    multiple=True,
)
@option("--tokenizer PATH", "Tokenizer file or folder to use instead.")
@option("--base PATH", "Model that training started from, if SOURCE contains only the trained weights.")
@option("--drop", "Leave out parts that transformers does not support.")
@option(
    "--qkv-layout",
    "Order of fused matrices in a MindFormers file: plain up to 1.4, interleaved since 1.5.",
    ["plain", "interleaved"],
)
@option(
    "--adapter",
    "Merge the LoRA adapter of a training run into its weights, or write it separately. [default: merge]",
    ["merge", "split"],
)
@option(
    "--quant",
    "Codes of a GGUF file: their values (default), or the same codes as those of compressed-tensors. A quantized "
    "Hugging Face folder keeps them unless their values are asked for.",
    ["dequantize", "keep"],
)
@option("--strategy PATH", "Strategy file or folder of a MindFormers run.  [default: next to the rank folders]")
@option("--root KEYS", "Model in a distributed checkpoint that has several, such as a.b.")
@option("--code FOLDER", "Folder with the model's own Python files and its config.json, if they are elsewhere.")
@option(
    "--trust-remote-code", "Copy the model's own Python code, and run it to check the weights; only if you trust it."
)
def command(source: str, as_json: bool, dry_run: bool, output: Path, **choices: Any) -> None:
    """Convert the training checkpoint SOURCE into the Hugging Face folder OUT.

    SOURCE is a file or folder; its format is detected by its content. Nothing in it is executed without
    --trust-remote-code. A Hugging Face folder is rewritten with --dtype, --max-shard-size or --quant dequantize.
    """
    from llmconv.convert.to_hugging_face import to_hf

    plan = to_hf(source, output, dry_run=dry_run, **choices)
    if as_json:
        detected = {"format": plan.checkpoint.format, "source_type": plan.checkpoint.source_type or None}
        options.print_json({**detected, **options.as_result(plan, output, dry_run)})
    else:
        options.print_plan(plan, output, dry_run)
