"""`llmconv onnx-adapter`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option
from llmconv.progress import say


@click.command(name="onnx-adapter", cls=Command)
@click.argument("folder")
@click.argument("adapter")
@option("-o --output FILE", "File to write, X.onnx_adapter.", options.Output(), required=True)
@option("--alpha", "lora_alpha, if the adapter's files do not contain it.", float)
@option("--overwrite", "Replace an existing file.")
@option("--dry-run", "Check everything and stop.")
@options.as_json
@options.talk
def command(folder: str, adapter: str, output: Path, as_json: bool, **choices: Any) -> None:
    """Write the LoRA factors of ADAPTER as a file for the graphs in FOLDER.

    FOLDER is the base with graphs of `llmconv export --lora-inputs`; ADAPTER is a LoRA that merge-lora reads. The file
    is for onnxruntime's `LoraAdapter` and for `llmconv generate --adapter`: one base serves many adapters.
    """
    from llmconv.convert.adapter_file import onnx_adapter

    made = onnx_adapter(folder, adapter, output, **choices)
    if as_json:
        options.print_json({"file": str(made.path), "bytes": made.nbytes, "modules": list(made.modules)})
    done = "would write" if choices["dry_run"] else "wrote"
    say(f"{done} {made.path}: factors of {len(made.modules)} modules, {made.nbytes:,} bytes")
