"""Objects larger than memory: what a run takes of memory and disk, measured from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import zero_checkpoint
from benchmarks.bucket_server import environment, requests, serving
from benchmarks.sparse import save_composer
from llmconv.files.mirror import CHUNK

SIZE = 6 * 10**9
LIMIT = 256 << 20
"""Bytes of temporary files in these tests."""

PROGRAM = f"""
from llmconv.files.mirror import CHUNK_FILE
CHUNK_FILE.limit = {LIMIT}
from llmconv.cli import main
main()
"""


@dataclass
class Usage:
    """Exit code of a run, and the most that it took, in bytes."""

    code: int
    memory: int
    disk: int


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a checkpoint of 6 GB, of which 2 GB are the model; all of it is a hole."""
    folder = tmp_path_factory.mktemp("large")
    save_composer(folder / "composer.pt", *zero_checkpoint.deep(SIZE))
    save_composer(folder / "small.pt", *zero_checkpoint.deep(1e8))
    with serving(folder) as address:
        yield address


def start(endpoint: str, out: str, source: str = "composer.pt") -> subprocess.Popen[bytes]:
    arguments = ["to-hf", f"s3://bucket/{source}", "-o", f"s3://bucket/{out}", "--dtype", "bfloat16"]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], env=os.environ | environment(endpoint))


def disk_use(process: int, folder: Path) -> int:
    """Bytes on the disk of all files in `folder`, those without a name included."""
    paths = [*folder.rglob("*"), *Path(f"/proc/{process}/fd").glob("*")]
    total = 0
    for path in paths:
        try:
            inside = path.is_relative_to(folder) or os.readlink(path).startswith(str(folder))
            total += path.stat().st_blocks * 512 if inside else 0
        except FileNotFoundError:
            continue
    return total


def peak_memory(process: int) -> int:
    """The largest resident set so far; that of `wait4` would include the memory of pytest, which forked it."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(fields.get("VmHWM", "0 kB").split()[0]) * 1024


def finish(process: subprocess.Popen[bytes], folder: Path) -> Usage:
    memory = disk = 0
    while process.poll() is None:
        memory, disk = max(memory, peak_memory(process.pid)), max(disk, disk_use(process.pid, folder))
        time.sleep(0.05)
    return Usage(process.returncode, memory, disk)


@pytest.mark.slow
def test_memory_and_disk_do_not_grow_with_the_object(endpoint: str, temporary: Path) -> None:
    used = finish(start(endpoint, "out"), temporary)
    assert used.code == 0
    assert used.memory < min(400e6, finish(start(endpoint, "small", "small.pt"), temporary).memory + 150e6)
    assert CHUNK < used.disk < LIMIT + 32 * CHUNK
    assert not [*temporary.iterdir()]
    asked = Counter(requests(endpoint))
    assert asked["HEAD", "composer.pt"] == 1
    assert asked["GET", "composer.pt"] <= 2 + -(-SIZE // 3 // CHUNK) * 1.02


@pytest.mark.slow
def test_a_killed_run_leaves_holes_only(endpoint: str, temporary: Path) -> None:
    process = start(endpoint, "killed")
    while disk_use(process.pid, temporary) < 8 * CHUNK:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert disk_use(process.pid, temporary) < 1 << 20
    for path in [*temporary.iterdir()]:
        shutil.rmtree(path)
