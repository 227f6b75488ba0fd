"""A 1.1 B bfloat16 Llama to GGUF and back, against `cp` of what is written."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measure import FOLDER, Target, interleaved, llmconv, median, remove, report, run, table
from benchmarks.models import base

ROUNDS = 3


def written(dtype: str) -> Path:
    """The model as a GGUF file, made on first use."""
    folder = FOLDER / f"gguf-{dtype}"
    if not folder.exists():
        part = FOLDER / f"gguf-{dtype}.part"
        remove(part)
        run(llmconv("from-hf", base(), "-o", part, "--to", "gguf", "--dtype", dtype))
        part.rename(folder)
    return folder


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    output = FOLDER / "out"
    made = {dtype: written(dtype) for dtype in ("float16", "q8_0", "q4_0")}
    commands = {
        **{
            f"`from-hf --to gguf --dtype {dtype}`": llmconv(
                "from-hf", base(), "-o", output, "--to", "gguf", "--dtype", dtype
            )
            for dtype in ("float16", "q8_0")
        },
        "`cp` of the float16 file": ["cp", "-r", str(made["float16"]), str(output)],
        "`to-hf` of the q4_0 file, `--quant keep`": llmconv("to-hf", made["q4_0"], "-o", output, "--quant", "keep"),
        "`to-hf` of the q4_0 file, `--dtype bfloat16`": llmconv(
            "to-hf", made["q4_0"], "-o", output, "--dtype", "bfloat16"
        ),
        "`cp` of the q4_0 file": ["cp", "-r", str(made["q4_0"]), str(output)],
        "`from-hf --to gguf --dtype q4_k_m`": llmconv(
            "from-hf", base(), "-o", output, "--to", "gguf", "--dtype", "q4_k_m"
        ),
    }
    results = interleaved(commands, ROUNDS, output)
    walls = {name: median(runs, lambda item: item.wall) for name, runs in results.items()}
    names = list(commands)
    targets = [
        Target("float16: wall time / `cp` of the file", walls[names[0]] / walls[names[2]], 2),
        Target("q8_0: wall time / `cp` of the float16 file", walls[names[1]] / walls[names[2]], 3),
        Target("q4_0, codes kept: wall time / `cp` of the file", walls[names[3]] / walls[names[5]], 3),
        Target("peak RSS, MB", max(item.peak_mb for name in names if "cp" not in name for item in results[name]), 500),
    ]
    body = "A random 1.1 B Llama (2.2 GB of bfloat16) and its GGUF files; medians.\n\n" + table(results)
    return report("gguf", "GGUF there and back", body, targets)


if __name__ == "__main__":
    sys.exit(main())
