"""SIGKILL of a run with workers, and of its workers, at every phase, in a bucket and in a local folder."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from llmconv.convert import to_hf
from tests.builders.hf_models import LLAMA, save_model
from tests.builders.shard_outputs import written
from tests.builders.to_hf_process import start_to_hf, workers_of
from tests.stores.bucket import Bucket

pytestmark = pytest.mark.slow

SIZE = "16KB"

PHASES = range(1, 1000, 4 if os.environ.get("ROWS") == "all" else 9)
"""Requests at which a run is killed; workers make it a matter of chance which they are."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", LLAMA, {"tokenizer.json": b"{}"})


@pytest.fixture
def expected(model: Path, tmp_path: Path) -> dict[str, bytes]:
    to_hf(model, tmp_path / "alone", max_shard_size=SIZE)
    return written(tmp_path / "alone")


def kill(processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def runs(process: int) -> bool:
    """Whether it has not ended; a zombie has, also if nobody asks for its exit code."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until_gone(processes: list[int]) -> None:
    """Orphans end by themselves."""
    until = time.monotonic() + 20
    while any(map(runs, processes)):
        assert time.monotonic() < until, "a worker goes on without the process that started it"
        time.sleep(0.02)


def completed(process: subprocess.Popen[str]) -> None:
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr


@pytest.mark.one_row_in(2)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_killed_run_with_workers_is_completed_by_resume(
    late: bool, model: Path, expected: dict[str, bytes], bucket: Bucket
) -> None:
    for at in PHASES:
        folder = replace(bucket, prefix=f"{bucket.prefix}/{at}")
        bucket.set_faults(hold=at, late=late)
        with start_to_hf(model, f"{folder}/out", SIZE, "--workers", "2") as process:
            held, workers = bucket.wait_until_held(process), workers_of(process)
            process.kill()
        wait_until_gone(workers)
        bucket.set_faults()
        if not held:
            break
        to_hf(model, f"{folder}/out", max_shard_size=SIZE, resume=True)
        assert folder.files() == expected, at
    assert at > 30


def test_workers_that_are_killed_are_replaced(model: Path, expected: dict[str, bytes], bucket: Bucket) -> None:
    for at in PHASES:
        folder = replace(bucket, prefix=f"{bucket.prefix}/{at}")
        bucket.set_faults(hold=at)
        with start_to_hf(model, f"{folder}/out", SIZE, "--workers", "2") as process:
            held, workers = bucket.wait_until_held(process), workers_of(process)
            bucket.set_faults()
            if not workers:
                process.kill()  # it does not write shards yet, or no longer
            kill(workers)
            if workers:
                completed(process)
                assert folder.files() == expected, at
        if not held:
            break
    assert at > 30


def journaled(out: Path) -> int:
    """Number of shards in the journals of an unfinished local output."""
    partial = out.with_name(f".{out.name}.llmconv-partial")
    with suppress(FileNotFoundError):
        if shared := len([*partial.glob("journal-*.jsonl")]):
            return shared
        return (partial / "journal.jsonl").read_text().count("\n") - 1
    return 0


@pytest.mark.parametrize("options", [(), ("--workers", "2")], ids=["alone", "workers"])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_a_killed_run_into_a_local_folder_is_completed_by_resume(
    count: int, options: tuple[str, ...], model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    with start_to_hf(model, tmp_path / "out", SIZE, *options) as process:
        while journaled(tmp_path / "out") < count and process.poll() is None:
            time.sleep(0.001)
        workers = workers_of(process)
        process.kill()
    wait_until_gone(workers)
    assert not (tmp_path / "out").exists() or written(tmp_path / "out") == expected
    with start_to_hf(model, tmp_path / "out", SIZE, *options, "--resume") as process:
        completed(process)
    assert written(tmp_path / "out") == expected


def test_a_worker_that_is_killed_in_a_local_folder_is_replaced(
    model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    for count in range(1, 6):
        out = tmp_path / f"out-{count}"
        with start_to_hf(model, out, SIZE, "--workers", "2") as process:
            while journaled(out) < count and process.poll() is None:
                time.sleep(0.001)
            kill(workers_of(process)[:1])
            completed(process)
        assert written(out) == expected


def full_disk(small_disk: Path, when: Callable[[], bool]) -> None:
    """Fills the disk as soon as a condition is met."""
    while not when():
        time.sleep(0.001)
    with open(small_disk / "other", "wb") as file, suppress(OSError):
        file.write(bytes(2 << 20))


@pytest.mark.parametrize("options", [("--workers", "2"), ("--part", "0/1")], ids=["workers", "part"])
def test_a_disk_that_fills_up_fails_and_resume_goes_on(
    options: tuple[str, ...], model: Path, expected: dict[str, bytes], small_disk: Path
) -> None:
    out = small_disk / "out"
    with start_to_hf(model, out, SIZE, *options) as process:
        full_disk(small_disk, lambda: journaled(out) >= 1 or process.poll() is not None)
        _, stderr = process.communicate()
    assert process.returncode == 4, stderr
    assert stderr.startswith("error: ") and "No space left" in stderr and "free some space" in stderr
    assert stderr.count("\n") == 3 and not out.exists()
    (small_disk / "other").unlink()
    with start_to_hf(model, out, SIZE, "--resume") as process:
        completed(process)
    assert written(out) == expected
