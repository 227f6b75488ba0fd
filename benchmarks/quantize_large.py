"""export --quant int4 of a Llama 3.1 405B: planned whole, and one layer with its head and embedding really written."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.export_large import LAYERS, sparse
from benchmarks.measure import FOLDER, Target, llmconv, remove, report, run
from benchmarks.models import base
from benchmarks.watch import Memory, watch

LIMIT = 16 * 10**9
ONE, WHOLE, SMALL = "1 of 126 layers, embedding and head, written", "126 layers, planned", "1.1 B, written"
OPTIONS = ("--quant", "int4", "--target", "ort-cpu")
NO_SPACE = 3


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    small, one = (exported(base()), exported(sparse(1)))
    command = llmconv("export", sparse(LAYERS), "-o", FOLDER / "out", *OPTIONS, "--dry-run")
    whole = run(command, accepted=(0, NO_SPACE))
    body = "\n".join(
        [
            "Shapes of Llama 3.1 405B in bfloat16; weights are holes in files, and are read and rounded as others.",
            "All layers are only planned (`--dry-run`), since 264 GB would be written; a disk with less space is",
            "refused. The layer that is written has the model's largest matrices, 16384 x 53248 and 128256 x 16384.",
            "",
            "| layers | seconds | peak RSS, MB | of it private at most | of it mapped at most |",
            "| --- | --- | --- | --- | --- |",
            f"| {WHOLE} | {whole.wall:.0f} | {whole.peak_mb:.0f} | | |",
            row(ONE, one),
            row(SMALL, small),
        ]
    )
    targets = [
        Target("126 layers, planned: peak RSS, MB", whole.peak_mb, 1500),
        Target("one layer / 1.1 B, private memory", one.private_mb / small.private_mb, 1.5),
    ]
    return report("quantize_large", "export --quant of 405 B", body, targets)


def exported(folder: Path) -> Memory:
    """The memory of one export, whose output is removed before and after."""
    remove(FOLDER / "out")
    found = watch(llmconv("export", folder, "-o", FOLDER / "out", *OPTIONS), LIMIT)
    remove(FOLDER / "out")
    return found


def row(name: str, found: Memory) -> str:
    """A Markdown row."""
    return f"| {name} | {found.wall:.0f} | {found.peak_mb:.0f} | {found.private_mb:.0f} | {found.mapped_mb:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
