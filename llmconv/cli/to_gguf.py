"""`llmconv to-gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option


class GGUFOutput(options.Output):
    """A GGUF file to write, or the folder of one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The file; a folder is recognized by the `/` at its end, which a path would lose."""
        from llmconv.convert.from_hugging_face import gguf_path

        return gguf_path(value)


@click.command(name="to-gguf", cls=Command)
@click.argument("model")
@option("-o --output FILE", "File to write, X.gguf; of a folder its model.gguf.", GGUFOutput(), required=True)
@option(
    "--type",
    "Type of the matrices, as llama-quantize has them.  [default: that of MODEL]",
    ["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0"],
    default=None,
)
@option("--imatrix FILE", "Importance matrix of llama.cpp, for a type with blocks.", default=None)
@option(
    "--calibrate FILE|default",
    "Text on which llmconv measures the importance matrix itself; `default`: llmconv's own.",
    default=None,
)
@option("--overwrite", "Replace an existing file.")
@options.dry_run
@options.as_json
@options.talk
def command(model: str, as_json: bool, dry_run: bool, output: Path, **choices: Any) -> None:
    """Write the Hugging Face folder MODEL as one GGUF file of llama.cpp.

    The file is that of `from-hf --to gguf`. A model, or a tokenizer, that a GGUF file cannot hold exactly is refused;
    `verify FILE --client llamacpp --reference MODEL` compares what llama.cpp computes.
    """
    from llmconv.compressed.gguf import to_gguf

    plan = to_gguf(model, output, dry_run=dry_run, **choices)
    if as_json:
        options.print_json({"format": "gguf", **options.as_result(plan, output, dry_run)})
    else:
        options.print_plan(plan, output, dry_run)
