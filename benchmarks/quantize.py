"""export --quant int4 of a 1.1 B bfloat16 Llama, compared with the ORT-GenAI builder's int4."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.exporters import GENAI, add_tokenizer, command
from benchmarks.measure import FOLDER, Target, interleaved, llmconv, median, report, table
from benchmarks.models import base

ROUNDS = 2


def model() -> Path:
    """The model with a tokenizer, as a folder of its own; the weights are a hard link."""
    folder = FOLDER / "base-tokenizer"
    if not folder.exists():
        shutil.copytree(base(), folder, copy_function=lambda source, target: Path(target).hardlink_to(source))
        add_tokenizer(folder)
    return folder


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    folder, output = model(), FOLDER / "out"
    ours, rtn = "`llmconv export --quant int4`", "`llmconv export --quant int4 --method rtn`"
    rival = [{"fp32": "int4"}.get(word, word) for word in command(GENAI, folder, output)]
    commands = {
        ours: llmconv("export", folder, "-o", output, "--quant", "int4"),
        rtn: llmconv("export", folder, "-o", output, "--quant", "int4", "--method", "rtn"),
        f"{GENAI}, int4": rival,
    }
    results = interleaved(commands, ROUNDS, output)
    wall = {name: median(runs, lambda item: item.wall) for name, runs in results.items()}
    peak = max(item.peak_mb for item in results[ours])
    targets = [
        Target(f"part of the {GENAI}'s time", wall[ours] / wall[f"{GENAI}, int4"], 0.5),
        Target("peak RSS, MB", peak, 700),
    ]
    body = "A random 1.1 B Llama in bfloat16 (2.2 GB). llmconv searches for scales; the builder does not.\n\n"
    return report("quantize", "export --quant", body + table(results), targets)


if __name__ == "__main__":
    sys.exit(main())
