"""to-hf of a Composer checkpoint with Adam state of a 1.1 B bfloat16 Llama, against `cp` of the model's bytes."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measure import FOLDER, Target, interleaved, llmconv, median, python, report, run, table
from benchmarks.models import base

ROUNDS = 5
SAVE = """
import sys
from pathlib import Path
from benchmarks.composer_checkpoint import save
save(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def checkpoint() -> Path:
    """The training checkpoint (11 GB, of which 2.2 GB on disk), created on first use by another process."""
    path, part = FOLDER / "ep0-ba2-rank0.pt", FOLDER / "ep0-ba2-rank0.part"
    if not path.exists():
        run(python(SAVE, str(base()), str(part)))
        part.rename(path)
    return path


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    source, output = checkpoint(), FOLDER / "out"
    commands = {
        "`llmconv to-hf`": llmconv("to-hf", source, "-o", output),
        "`cp` of the model's bytes": ["cp", "-r", str(base()), str(output)],
        "`import torch`": python("import torch"),
    }
    results = interleaved(commands, ROUNDS, output)
    walls = [median(runs, lambda item: item.wall) for runs in results.values()]
    targets = [
        Target("wall time / (`cp` + `import torch`)", walls[0] / (walls[1] + walls[2]), 1.3),
        Target("peak RSS, MB", max(item.peak_mb for item in results["`llmconv to-hf`"]), 700),
    ]
    size = source.stat().st_size / 1e9
    body = f"A random 1.1 B Llama (2.2 GB of bfloat16) in a checkpoint of {size:.1f} GB; medians.\n\n" + table(results)
    return report("to_hf", "to-hf", body, targets)


if __name__ == "__main__":
    sys.exit(main())
