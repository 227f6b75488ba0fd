"""quantize: a 1.1 B bfloat16 Llama as folders for vLLM, against copying the bytes of the result."""

from __future__ import annotations

import shutil
import sys

from benchmarks.measure import FOLDER, Target, interleaved, llmconv, median, remove, report, run, table
from benchmarks.models import base

ROUNDS = 2
SCHEMES = ("fp8-block", "w4a16 --method search", "nvfp4a16")


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    model, output, example = base(), FOLDER / "out", FOLDER / "fp8-block"
    remove(output)
    if not example.exists():
        run(llmconv("quantize", model, "-o", example, "--scheme", "fp8-block"))
    quantize = "quantize", model, "-o", output, "--scheme"
    commands = {f"`quantize --scheme {one}`": llmconv(*quantize, *one.split()) for one in SCHEMES}
    commands["`cp` of the folder of fp8-block"] = ["cp", "-r", str(example), str(output)]
    commands["`llmconv --version`"] = llmconv("--version")
    results = interleaved(commands, ROUNDS, output)
    shutil.rmtree(example)
    walls = {name: median(runs, lambda item: item.wall) for name, runs in results.items()}
    peaks = {name: max(item.peak_mb for item in runs) for name, runs in results.items()}
    block, integers = (f"`quantize --scheme {one}`" for one in ("fp8-block", "w4a16 --method search"))
    targets = [
        Target("fp8-block: wall time / `cp` of the result", walls[block] / walls["`cp` of the folder of fp8-block"], 2),
        Target("fp8-block: peak RSS, MB", peaks[block], 400),
        Target("w4a16: wall time, s", walls[integers], 15),
        Target("w4a16: peak RSS, MB", peaks[integers], 700),
    ]
    body = "A random 1.1 B Llama (2.2 GB of bfloat16); medians.\n\n" + table(results)
    return report("compressed", "quantize", body, targets)


if __name__ == "__main__":
    sys.exit(main())
