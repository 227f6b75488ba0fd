"""to-hf of 30 GB checkpoints with optimizer state: memory depends on a block, not on the size of the file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import zero_checkpoint
from benchmarks.measure import FOLDER, Target, interleaved, llmconv, report, table
from benchmarks.zero_checkpoint import Zeros

SIZE = 30 * 10**9


def save_composer(path: Path, parameters: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> None:
    """A Composer checkpoint with Adam's moments, every tensor a hole."""
    model = {f"model.{name}": Zeros(*shape) for name, shape in parameters.items()}
    moments = {name: {"exp_avg": Zeros(*one.shape), "exp_avg_sq": Zeros(*one.shape)} for name, one in model.items()}
    integrations = {"huggingface": {"model": {"config": {"file_extension": ".json", "content": dict(config)}}}}
    state = {"model": model, "optimizers": {"Adam": {"state": moments}}, "integrations": integrations}
    zero_checkpoint.save_sparse(path, {"state": state, "rng": []})


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    zero, composer, output = FOLDER / "zero-30gb", FOLDER / "composer-30gb.pt", FOLDER / "out"
    if not zero.exists():
        zero_checkpoint.save(zero, *zero_checkpoint.deep(SIZE))
    if not composer.exists():
        save_composer(composer, *zero_checkpoint.deep(SIZE))
    commands = {
        "`llmconv to-hf` of DeepSpeed ZeRO-3": llmconv("to-hf", zero, "-o", output, "--dtype", "bfloat16"),
        "`llmconv to-hf` of Composer": llmconv("to-hf", composer, "-o", output, "--dtype", "bfloat16"),
    }
    results = interleaved(commands, 1, output)
    targets = [Target(f"{name}: peak RSS, MB", runs[0].peak_mb, 700) for name, runs in results.items()]
    body = f"Checkpoints of {SIZE / 1e9:.0f} GB, holes in files, with correct checksums.\n\n{table(results)}"
    return report("sparse", "to-hf of checkpoints larger than memory", body, targets)


if __name__ == "__main__":
    sys.exit(main())
