"""export --prefill --incremental of a 1.1 B float32 Llama, in place, compared with other exporters."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.exporters import GENAI, MOBIUS, OPTIMUM, add_tokenizer, command
from benchmarks.measure import FOLDER, Measurement, Target, interleaved, llmconv, median, report, table
from benchmarks.models import base

ROUNDS = {OPTIMUM: 1, GENAI: 3, MOBIUS: 3}
"""The slowest takes minutes and 10 GB of memory."""
GRAPHS = ("prefill.onnx", "decode.onnx", "llmconv.json")


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    folder = model()
    ours = "`llmconv export --prefill --incremental`"
    commands = {ours: llmconv("export", folder, "--prefill", "--incremental", "--overwrite")}
    results: dict[str, list[Measurement]] = {}
    for number in range(max(ROUNDS.values())):
        output = FOLDER / "out"
        rivals = {name: command(name, folder, output) for name, rounds in ROUNDS.items() if number < rounds}
        for name, runs in interleaved(commands | rivals, 1, output).items():
            results.setdefault(name, []).extend(runs)
    wall = {name: median(runs, lambda item: item.wall) for name, runs in results.items()}
    peak = {name: max(item.peak_mb for item in runs) for name, runs in results.items()}
    written = sum((folder / name).stat().st_size for name in GRAPHS)
    targets = [
        Target("seconds", wall[ours], 12),
        Target("peak RSS, MB", peak[ours], 900),
        Target("MB written", written / 1e6, 3),
        Target(f"part of {OPTIMUM}'s time", wall[ours] / wall[OPTIMUM], 1 / 6),
        Target(f"part of {OPTIMUM}'s memory", peak[ours] / peak[OPTIMUM], 1 / 8),
        Target(f"part of the {GENAI}'s time", wall[ours] / wall[GENAI], 1),
    ]
    body = f"A random 1.1 B Llama in float32 (4.4 GB); llmconv wrote {written:,} bytes, others the weights too."
    return report("export", "export", f"{body}\n\n{table(results)}", targets)


def model() -> Path:
    """The folder of the model, with a tokenizer."""
    folder = base("float32")
    add_tokenizer(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
