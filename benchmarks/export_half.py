"""Whether an export to half precision costs what one to float32 costs: a 1.1 B bfloat16 Llama of 22 layers."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.export_depth import sparse
from benchmarks.measure import FOLDER, Target, interleaved, llmconv, median, report, table

ROUNDS = 5


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and inode of every file in a folder, by name."""
    return {path.name: (path.stat().st_size, path.stat().st_ino) for path in folder.iterdir()}


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    folders = {precision: sparse(22, "bfloat16", f"-{precision}") for precision in ("float32", "bfloat16")}
    weights = {precision: files(folder)["model.safetensors"] for precision, folder in folders.items()}
    commands = {
        f"{precision} graphs": llmconv(
            *("export", folder, "--prefill", "--incremental", "--overwrite", "--precision", precision)
        )
        for precision, folder in folders.items()
    }
    results = interleaved(commands, ROUNDS, FOLDER / "nothing")
    wall = {name: median(runs, lambda item: item.wall) for name, runs in results.items()}
    peak = {name: median(runs, lambda item: item.peak_mb) for name, runs in results.items()}
    half = folders["bfloat16"]
    added = sum(size for name, (size, _) in files(half).items() if name not in {"model.safetensors", "config.json"})
    unchanged = files(half)["model.safetensors"] == weights["bfloat16"]
    targets = [
        Target("bfloat16 / float32 graphs, time", wall["bfloat16 graphs"] / wall["float32 graphs"], 1.1),
        Target("bfloat16 / float32 graphs, peak RSS", peak["bfloat16 graphs"] / peak["float32 graphs"], 1.1),
        Target("MB written besides the unchanged weights", added / 1e6 if unchanged else float("inf"), 3),
    ]
    body = (
        "A 1.1 B Llama in bfloat16, whose 2.2 GB of weights are a hole in a file, since only headers are read. "
        f"`--precision bfloat16` wrote {added:,} bytes.\n\n"
    )
    return report("export_half", "export to half precision", body + table(results), targets)


if __name__ == "__main__":
    sys.exit(main())
