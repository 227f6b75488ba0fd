"""merge-lora in one process and with --workers 2: seconds, memory of all processes together, and the same bytes.

python -m benchmarks.workers [--write FILE] [--rounds 3]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import FOLDER, INSTALLED, SETTLE, Target, llmconv, remove, report
from benchmarks.models import adapter, base
from llmconv.files.copying import cores

WORKERS, SIZE, RANK = 2, "200MB", 64
INTERVAL = 0.05
"""Seconds between two looks at the memory."""

ONE, MANY = "one process", f"`--workers {WORKERS}`"


@dataclass(frozen=True)
class Family:
    """What a command and the processes that it starts took together.

    Attributes:
        wall: seconds.
        cpu: user plus system seconds.
        peak_mb: largest sum of their proportional set sizes, in 10^6 bytes.
    """

    wall: float
    cpu: float
    peak_mb: float


def watched(command: Sequence[str]) -> Family:
    """Runs a command to its end; SystemExit if it fails."""
    started, before, peak = time.perf_counter(), os.times(), 0
    process = subprocess.Popen(command, env=INSTALLED, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, sum(map(_held, _with_children(process.pid))))
        time.sleep(INTERVAL)
    wall, after = time.perf_counter() - started, os.times()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Family(wall, used, peak / 1e6)


def _with_children(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [one for child in file.read_text().split() for one in _with_children(int(child))]
    return found


def _held(pid: int) -> int:
    """Bytes of a process; a page that several map counts in parts."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return 0


def digest(folder: Path) -> str:
    """A hash of all files and their names."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            total.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def measured(rounds: int) -> tuple[dict[str, list[Family]], bool]:
    """The runs of both, in turn, and whether all wrote the same bytes."""
    output, command = FOLDER / "out", llmconv("merge-lora", base(), adapter(RANK), "--max-shard-size", SIZE)
    ways = {ONE: [], MANY: ["--workers", str(WORKERS)]}
    found: dict[str, list[Family]] = {name: [] for name in ways}
    digests = set()
    for _ in range(rounds):
        for name, options in ways.items():
            remove(output)
            os.sync()
            time.sleep(SETTLE)
            found[name].append(watched([*command, "-o", str(output), *options]))
            digests.add(digest(output))
            print(f"  {name}: {found[name][-1].wall:.2f} s", file=sys.stderr)
    remove(output)
    return found, len(digests) == 1


def row(name: str, runs: Sequence[Family]) -> str:
    """A Markdown row: medians, and the largest memory."""
    walls = [one.wall for one in runs]
    spread = f"{statistics.median(walls):.2f} ({min(walls):.2f} to {max(walls):.2f})"
    cpu = statistics.median(one.cpu for one in runs)
    return f"| {name} | {len(runs)} | {spread} | {cpu:.2f} | {max(one.peak_mb for one in runs):.0f} |"


def limit(runs: Sequence[Family]) -> str:
    """How much faster workers could be at most."""
    busy = statistics.median(run.cpu / run.wall for run in runs)
    return (
        f"One process computes on all cores by itself: it keeps {busy:.1f} of {cores()} busy, so "
        f"workers could be\n{cores() / busy:.2f} times as fast at most. They help where one thread is the limit: the "
        "sha256 of each file."
    )


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    options, _ = parser.parse_known_args()
    found, same = measured(options.rounds)
    one, many = (statistics.median(run.wall for run in found[name]) for name in (ONE, MANY))
    targets = [
        Target("times faster with workers", one / many, 1.5, at_least=True),
        Target("the same bytes", float(same), 1, at_least=True),
        Target("peak of all processes, MB", max(run.peak_mb for run in found[MANY]), 1000),
    ]
    lines = [
        f"A random 1.1 B Llama (bfloat16, 2.2 GB, in the page cache), a rank-{RANK} adapter on all linear layers,",
        f"shards of {SIZE}; medians of runs in turn. Memory is the sum over all processes, shared pages counted once.",
        "",
        "| job | runs | wall, s (range) | CPU, s | peak memory, MB |",
        "| --- | --- | --- | --- | --- |",
        *(row(name, runs) for name, runs in found.items()),
        "",
        limit(found[ONE]),
    ]
    return report("workers", "merge-lora with workers", "\n".join(lines), targets)


if __name__ == "__main__":
    sys.exit(main())
