"""The plan of a Llama 3.1 405B for 16 hosts: seconds and memory of the planner, and how even its parts are.

The checkpoint has 812 GB in holes of files; of its weights nothing is read.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.export_large import sparse
from benchmarks.large_model import RANK
from benchmarks.measure import FOLDER, Measurement, Target, interleaved, llmconv, median, python, report
from llmconv.checkpoint import open_checkpoint
from llmconv.files.safetensors_file import encode_header
from llmconv.output.plan import Shard, plan_checkpoint
from llmconv.output.work import Part
from llmconv.tensors import BY_NAME

SIZES = ("5GB", "2GB")
COUNTS = (16, 48, 64)
ROUNDS = 3
NO_SPACE = 3
"""Exit code of a dry run whose output has no room; it comes after the plan."""

REPEATED = """
import sys, time
from llmconv.convert import merge_lora, to_hf
from llmconv.errors import InputRefused
from llmconv.progress import set_quiet
set_quiet(True)
for _ in range(3):
    started = time.perf_counter()
    try:
        (merge_lora if len(sys.argv) > 4 else to_hf)(*sys.argv[2:], max_shard_size=sys.argv[1])
    except InputRefused as error:
        assert "no space" in error.message, error
    seconds = time.perf_counter() - started
print(seconds)
"""


@cache
def shards_of(size: str) -> tuple[Shard, ...]:
    """The shards that the planner makes of the 405 B checkpoint, at most `size` each."""
    return plan_checkpoint(open_checkpoint(sparse()), size).shards


def adapter() -> Path:
    """A rank-16 adapter of zeros, float32, on all linear modules of the 405 B model: 2.5 GB in a hole."""
    folder = FOLDER / "sparse-405b-adapter"
    folder.mkdir(parents=True, exist_ok=True)
    weights = open_checkpoint(sparse())
    shapes: dict[str, tuple[int, ...]] = {}
    for name in (name for name in weights if name.endswith("proj.weight")):
        prefix, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", weights[name].shape
        shapes |= {f"{prefix}.lora_A.weight": (RANK, columns), f"{prefix}.lora_B.weight": (rows, RANK)}
    header = encode_header({name: (BY_NAME["float32"], shape) for name, shape in shapes.items()})
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * sum(rows * columns for rows, columns in shapes.values()))
    modules = sorted({name.split(".")[-3] for name in shapes})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": modules, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def repeated(*arguments: str | Path) -> float:
    """Seconds of a plan in a process that has made two before, as a task of a cluster or a worker may."""
    answer = subprocess.run(python(REPEATED, *map(str, arguments)), check=True, capture_output=True, text=True)
    return float(answer.stdout)


def commands() -> dict[str, Sequence[str]]:
    """Name to command of every plan that is measured."""
    made: dict[str, Sequence[str]] = {}
    for size in SIZES:
        options = ("-o", FOLDER / "out", "--dry-run", "--max-shard-size", size)
        made[f"`to-hf`, shards of {size}"] = llmconv("to-hf", sparse(), *options)
        made[f"`merge-lora`, shards of {size}"] = llmconv("merge-lora", sparse(), adapter(), *options)
    return made


def measured() -> dict[str, tuple[list[Measurement], float]]:
    """The runs of every plan, and the seconds of another one in the same process."""
    results = interleaved(commands(), ROUNDS, FOLDER / "out", accepted=(0, NO_SPACE))
    found = {}
    for name, runs in results.items():
        inputs = (sparse(), adapter()) if "merge" in name else (sparse(),)
        found[name] = (runs, repeated(name.rpartition(" ")[2], *inputs, FOLDER / "out"))
    return found


def bytes_of_parts(shards: Sequence[Shard], count: int) -> list[int]:
    """Bytes of each of `count` parts."""
    sizes = {shard.name: shard.nbytes for shard in shards}
    return [sum(sizes[name] for name in Part(number, count).chosen(shards)) for number in range(count)]


def plan_rows(found: dict[str, tuple[list[Measurement], float]]) -> list[str]:
    """Markdown rows of times and memory."""
    rows = ["| plan of | runs | seconds (range) | again in the same process, s | peak RSS, MB |", "|" + " --- |" * 5]
    for name, (runs, again) in found.items():
        walls = [one.wall for one in runs]
        spread = f"{median(runs, lambda one: one.wall):.1f} ({min(walls):.1f} to {max(walls):.1f})"
        rows.append(f"| {name} | {len(runs)} | {spread} | {again:.1f} | {max(one.peak_mb for one in runs):.0f} |")
    return rows


def part_rows() -> list[str]:
    """Markdown rows of how even the parts are."""
    rows = ["| shards | parts | largest, GB | mean, GB | largest / mean |", "| --- | --- | --- | --- | --- |"]
    for size in SIZES:
        shards = shards_of(size)
        for count in COUNTS:
            parts = bytes_of_parts(shards, count)
            most, mean = max(parts) / 1e9, sum(parts) / count / 1e9
            rows.append(f"| {len(shards)} of {size} | {count} | {most:.2f} | {mean:.2f} | {most / mean:.3f} |")
    return rows


def main() -> int:
    """Measures, prints the tables, and returns 1 if a target is missed."""
    found = measured()
    shards = shards_of(SIZES[0])
    tensors, nbytes = sum(len(shard.tensors) for shard in shards), sum(shard.nbytes for shard in shards)
    parts = bytes_of_parts(shards, COUNTS[0])
    runs = [one for name, (runs, _) in found.items() if "to-hf" in name for one in runs]
    targets = [
        Target("`to-hf`: seconds of a plan", median(runs, lambda one: one.wall), 5),
        Target("peak RSS, MB", max(one.peak_mb for runs, _ in found.values() for one in runs), 200),
        Target(f"largest / mean of {COUNTS[0]} parts", max(parts) * len(parts) / sum(parts), 1.05),
    ]
    lines = [
        f"The shapes of Llama 3.1 405B: {tensors} tensors, {nbytes:,} bytes of bfloat16 in {len(shards)} shards; files",
        "are holes on the disk, and only their headers are read. A plan of `merge-lora` also reads and hashes the",
        "adapter (rank 16 on all linear modules, float32, 2.5 GB). Seconds include the start of the process.",
        "",
        *plan_rows(found),
        "",
        *part_rows(),
    ]
    return report("scale_out", "Plan of 405 B for 16 hosts", "\n".join(lines), targets)


if __name__ == "__main__":
    sys.exit(main())
