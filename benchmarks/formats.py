"""to-hf of a 1.1 B bfloat16 Llama in each training format, against `cp` of the model's bytes and `import torch`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measure import FOLDER, Target, interleaved, llmconv, median, python, report, run, table
from benchmarks.models import base

ROUNDS = 5
FORMATS = {"accessory": 2, "meta": 2, "mindformers": 1, "paddle": 1}
"""Format to the number of files that the model is split over; Composer has a benchmark of its own, `to_hf`."""


def checkpoint(format: str, shards: int) -> Path:
    """The model in a training format (2.2 GB), created on first use by `llmconv from-hf`."""
    path = FOLDER / format
    if not path.exists():
        run(llmconv("from-hf", base(), "-o", path, "--to", format, "--shards", str(shards)))
    return path


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    output = FOLDER / "out"
    commands = {
        f"`llmconv to-hf` of {format}": llmconv("to-hf", checkpoint(format, shards), "-o", output)
        for format, shards in FORMATS.items()
    }
    baseline = {
        "`cp` of the model's bytes": ["cp", "-r", str(base()), str(output)],
        "`import torch`": python("import torch"),
    }
    results = interleaved(commands | baseline, ROUNDS, output)
    floor = sum(median(results[name], lambda item: item.wall) for name in baseline)
    targets = []
    for name in commands:
        ratio = median(results[name], lambda item: item.wall) / floor
        targets.append(Target(f"{name}: wall time / (`cp` + `import torch`)", ratio, 1.3))
        targets.append(Target(f"{name}: peak RSS, MB", max(item.peak_mb for item in results[name]), 700))
    split = ", ".join(f"{format} in {shards}" for format, shards in FORMATS.items())
    body = f"A random 1.1 B Llama (2.2 GB of bfloat16); files: {split}; medians.\n\n{table(results)}"
    return report("formats", "to-hf of every format", body, targets)


if __name__ == "__main__":
    sys.exit(main())
