"""verify of SmolLM2-135M with 4 bits, with its cost: by induction over layers, within a minute and 1.5 GB."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.measure import FOLDER, Target, llmconv, report
from benchmarks.smollm2 import smollm2
from benchmarks.watch import watch

SECONDS, LIMIT = 60.0, 1.5e9


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    model, rows, targets = smollm2(), [], []
    for preset in ("int4", "a8w8"):
        folder = FOLDER / f"smollm2-{preset}"
        subprocess.run(llmconv("export", model, "-o", folder, "--quant", preset, "--overwrite"), check=True)
        found = watch(llmconv("verify", folder, "--reference", model), 16 * 10**9)
        rows.append(f"| `{preset}` | {found.wall:.0f} | {found.peak_mb:.0f} |")
        if preset == "int4":
            peak = Target("peak memory, GB", found.peak_mb / 1e3, LIMIT / 1e9)
            targets = [Target("seconds", found.wall, SECONDS), peak]
    body = "\n".join(
        [
            "SmolLM2-135M-Instruct, a prefill and a decode graph; `llmconv verify FOLDER --reference MODEL`, imports",
            "included. All codes are audited, one layer runs all quick scenarios, each of the other 29 runs by itself,",
            "and the cost is measured on 1,024 tokens of text.",
            "",
            "| `--quant` | seconds | peak RSS, private and mapped, MB |",
            "| --- | --- | --- |",
            *rows,
        ]
    )
    return report("verify_quantized", "verify of quantized graphs", body, targets)


if __name__ == "__main__":
    sys.exit(main())
