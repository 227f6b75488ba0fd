"""delta extract and apply of a 1.1 B bfloat16 Llama that was tuned a little, against `cp` and torch in memory.

Takes about four minutes when the models are there. White noise is the slowest change for `--rank`.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.measure import (
    FOLDER,
    Measurement,
    Target,
    interleaved,
    llmconv,
    median,
    python,
    remove,
    report,
    run,
    table,
)
from benchmarks.models import base
from llmconv.checkpoint import open_checkpoint
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import write_checkpoint
from llmconv.tensors import Array, LazyTensor

ROUNDS = 2
RANK = 16
NOISE = 2e-4
"""Standard deviation of what is added to weights of 0.02: a few units in the last place of most of them."""

LAYER = ".layers.10."

MAKE = """
import sys, torch
from transformers import AutoModelForCausalLM
base, tuned = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16) for path in sys.argv[1:3])
below = base.state_dict()
for name, parameter in tuned.state_dict().items():
    parameter -= below[name]
tuned.save_pretrained(sys.argv[3])
"""
APPLY = """
import sys, torch
from transformers import AutoModelForCausalLM
base, delta = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16) for path in sys.argv[1:3])
above = delta.state_dict()
for name, parameter in base.state_dict().items():
    parameter += above[name]
base.save_pretrained(sys.argv[3])
"""
"""What FastChat's `make_delta` and `apply_delta` do, without the tokenizer."""


def tuned(name: str, part: str) -> Path:
    """The base with noise on the weights whose name has `part`, created on first use."""
    folder = FOLDER / name
    if not folder.exists():
        model = open_checkpoint(base())
        tensors = {name: _moved(name, one) if part in name else one for name, one in model.items()}
        write_checkpoint(plan_checkpoint(replace(model, tensors=tensors)), folder, steps=[], sources=[])
    return folder


def _moved(name: str, tensor: LazyTensor) -> LazyTensor:
    def load(start: int, stop: int) -> Array:
        generator = np.random.default_rng([zlib.crc32(name.encode()), start, 1])
        rows = tensor.rows(start, stop).astype(np.float32)
        rows += NOISE * generator.standard_normal(rows.shape, dtype=np.float32)
        return rows.astype(ml_dtypes.bfloat16)

    return LazyTensor(tensor.dtype, tensor.shape, load)


def size(folder: Path) -> int:
    """Bytes of the weights in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".zst", ".safetensors"))


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    model, whole, little = base(), tuned("tuned", ""), tuned("tuned-layer", LAYER)
    output, deltas = FOLDER / "out", [FOLDER / name for name in ("delta", "delta-layer", "delta-torch")]
    for folder in deltas:
        remove(folder)
    for source, folder in zip((whole, little), deltas, strict=False):
        run(llmconv("delta", "extract", model, source, "-o", folder))
    run(python(MAKE, *map(str, (model, whole, deltas[2]))))
    results = interleaved(
        {
            "`delta extract`": llmconv("delta", "extract", model, whole, "-o", output),
            "`delta extract` of one tuned layer": llmconv("delta", "extract", model, little, "-o", output),
            "`delta apply`": llmconv("delta", "apply", model, deltas[0], "-o", output),
            "`delta apply` of one tuned layer": llmconv("delta", "apply", model, deltas[1], "-o", output),
            "`delta apply` of FastChat's": llmconv("delta", "apply", model, deltas[2], "-o", output),
            "`cp` of the model": ["cp", "-r", str(model), str(output)],
        },
        ROUNDS,
        output,
    )
    rivals = {
        "FastChat's way: load both, subtract, save": python(MAKE, *map(str, (model, whole, output))),
        "FastChat's way: load both, add, save": python(APPLY, *map(str, (model, deltas[2], output))),
    }
    results |= interleaved(rivals, 1, output)
    rank = llmconv("delta", "extract", model, whole, "-o", output, "--rank", str(RANK))
    results |= interleaved({f"`delta extract --rank {RANK}`": rank}, 1, output)
    shares = [size(folder) / size(model) for folder in deltas]
    body = (
        f"A random 1.1 B Llama (bfloat16, {size(model) / 1e9:.1f} GB), and the same with noise of {NOISE:g} on every "
        f"weight of 0.02; medians. The exact delta has {shares[0]:.1%} of the model's size, {shares[1]:.2%} where one "
        f"layer of 22 was tuned; FastChat's has {shares[2]:.0%}.\n\n{table(results)}"
    )
    status = report("delta", "delta extract, delta apply", body, targets(results, shares))
    for folder in deltas:
        remove(folder)
    return status


def targets(results: dict[str, list[Measurement]], shares: list[float]) -> list[Target]:
    """What must hold of the measured figures."""
    walls = {name: median(runs, lambda item: item.wall) for name, runs in results.items()}
    copy = walls["`cp` of the model"]
    exact = [runs for name, runs in results.items() if name.startswith("`delta") and "rank" not in name]
    (rank,) = results[f"`delta extract --rank {RANK}`"]
    make, add = (walls[name] for name in walls if name.startswith("FastChat"))
    return [
        Target("apply of one tuned layer: wall time / `cp`", walls["`delta apply` of one tuned layer"] / copy, 2.5),
        Target("extract: times faster than in memory", make / walls["`delta extract`"], 1.5, at_least=True),
        Target("apply: times faster than in memory", add / walls["`delta apply`"], 1.5, at_least=True),
        Target("apply of FastChat's: times faster than its way", add / walls["`delta apply` of FastChat's"], 1.5, True),
        Target("peak RSS of extract and apply, MB", max(item.peak_mb for runs in exact for item in runs), 400),
        Target(f"extract --rank {RANK} of all 155 linear weights: CPU seconds", rank.cpu, 60),
        Target(f"extract --rank {RANK}: peak RSS, MB", rank.peak_mb, 600),
        Target("size of the delta / size of the model", shares[0], 0.35),
    ]


if __name__ == "__main__":
    sys.exit(main())
