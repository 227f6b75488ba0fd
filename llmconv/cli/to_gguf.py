"""`llmconv to-gguf`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option
from llmconv.errors import UsageProblem

WITH_IMPORTANCE = ("q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0")


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
def command(model: str, as_json: bool, dry_run: bool, output: Path, calibrate: str | None, **choices: Any) -> None:
    """Write the Hugging Face folder MODEL as one GGUF file of llama.cpp.

    The file is that of `from-hf --to gguf`. A model, or a tokenizer, that a GGUF file cannot hold exactly is refused;
    `verify FILE --client llamacpp --reference MODEL` compares what llama.cpp computes.
    """
    from llmconv.convert.from_hugging_face import to_gguf

    if calibrate is None:
        plan = to_gguf(model, output, dry_run=dry_run, **choices)
    else:
        plan = _measured(model, output, calibrate, dry_run=dry_run, **choices)
    if as_json:
        options.print_json({"format": "gguf", **options.as_result(plan, output, dry_run)})
    else:
        options.print_plan(plan, output, dry_run)


def _measured(model: str, output: Path, calibrate: str, *, dry_run: bool, **choices: Any) -> Any:
    """The plan of a file whose importance matrix is measured on a text; UsageProblem for two, or a type without one."""
    from llmconv.compressed import importance_matrix
    from llmconv.convert.from_hugging_face import to_gguf

    if choices["imatrix"] is not None:
        raise UsageProblem("`--calibrate` makes the importance matrix that `--imatrix` gives", hint="give one of them")
    if choices["type"] not in WITH_IMPORTANCE:
        types = ", ".join(WITH_IMPORTANCE)
        raise UsageProblem(
            "`--calibrate` is for types with blocks of 4 to 6 bits", hint=f"give `--type`, one of: {types}"
        )
    # refuses what can be refused before the text runs
    plan = to_gguf(model, output, dry_run=True, **choices)
    if dry_run:
        return plan
    with tempfile.TemporaryDirectory(prefix="llmconv-") as name:
        file = Path(name) / "imatrix.gguf"
        importance_matrix(model, file, calibrate=calibrate)
        return to_gguf(model, output, **{**choices, "imatrix": file})
