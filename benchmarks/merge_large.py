"""merge-lora into an 8 B Llama of 16 GB, of an adapter on all layers and of one on two of 32, against `cp`.

    python -m benchmarks.merge_large [--write FILE] [--divisor 2]     divides the widths: 4 GB

Needs twice the model's size on the disk; the model is removed at the end.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.large_model import MIDDLE, LargeModel
from benchmarks.measure import FOLDER, Measurement, Target, interleaved, llmconv, median, report, table
from llmconv.files.copying import can_clone

ALL, FEW, CP, DURABLE = (
    "`merge-lora`, all layers",
    "`merge-lora`, 2 of 32 layers",
    "`cp` of the model",
    "`cp` and `sync`",
)


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--divisor", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options, _ = parser.parse_known_args()
    model = LargeModel(FOLDER, options.divisor)
    try:
        results = measured(model, options.rounds)
        shards = list(model.base.glob("*.safetensors"))
        targets = judged(results, shared=can_clone(shards[0], FOLDER))
        size = sum(path.stat().st_size for path in shards) / 1e9
    finally:
        model.remove()
    body = (
        f"A random Llama of 32 layers (bfloat16, {size:.1f} GB in shards, not in the page cache), rank-16 adapters on "
        f"the linear layers; medians. `merge-lora` ends when all is on the disk, `cp` before.\n\n{table(results)}"
    )
    return report("merge_large", f"merge-lora into a model of {size:.0f} GB", body, targets)


def measured(model: LargeModel, rounds: int) -> dict[str, list[Measurement]]:
    """Every command in turn, each from a cold cache."""
    model.make()
    base, output = model.base, model.folder / "out"
    commands = {
        CP: ["cp", "-r", str(base), str(output)],
        ALL: llmconv("merge-lora", base, model.adapter(), "-o", output),
        FEW: llmconv("merge-lora", base, model.adapter(MIDDLE), "-o", output),
        DURABLE: ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/*', str(base), str(output)],
    }
    return interleaved(commands, rounds, output, model.forget)


def judged(results: dict[str, list[Measurement]], *, shared: bool) -> list[Target]:
    """What must hold; `shared` where the file system clones, and `cp` does it, too."""
    wall = {name: median(runs, lambda item: item.wall) for name, runs in results.items()}
    few = (
        Target("2 of 32 layers / all layers", wall[FEW] / wall[ALL], 0.5)
        if shared
        else Target("2 of 32 layers / `cp`", wall[FEW] / wall[CP], 1.05)
    )
    memory = Target("peak RSS, MB", max(item.peak_mb for name in (ALL, FEW) for item in results[name]), 1200)
    return [*([] if shared else [Target("all layers / `cp`", wall[ALL] / wall[CP], 1.2)]), few, memory]


if __name__ == "__main__":
    sys.exit(main())
