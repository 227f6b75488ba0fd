"""Two writers at one address in a store, in many interleavings: one output, of the same bytes as alone."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmconv.errors import LlmconvError
from llmconv.output.work import Finish, Part
from tests.builders.shard_outputs import sample, write, written
from tests.stores.bucket import Bucket

pytestmark = pytest.mark.slow

ROUNDS = 200 if os.environ.get("ROWS") == "all" else 25

DELAY = 0.02
"""Most seconds that the server waits before it carries out a request."""


def exit_code(out: str, seconds: float, options: dict[str, Any]) -> int:
    """The exit code of a command that writes there after some seconds."""
    time.sleep(seconds)
    try:
        write(sample(), out, **options)
    except LlmconvError as error:
        return error.exit_code
    return 0


def race(bucket: Bucket, expected: Path, *, parts: int = 0, **options: Any) -> list[tuple[int, ...]]:
    """Exit codes of two writers in each round, of which every one left a whole output and nothing else."""
    write(sample(), expected)
    codes = []
    for number in range(ROUNDS):
        folder = replace(bucket, prefix=f"{bucket.prefix}/{number}")
        for part in range(parts):
            write(sample(), f"{folder}/out", work=Part(part, parts))
        bucket.set_faults(delay=DELAY, seed=number)
        later = random.Random(number).uniform(0, 0.3)
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(exit_code, f"{folder}/out", seconds, options) for seconds in (0, later)]
            codes.append(tuple(run.result() for run in runs))
        assert folder.files() == written(expected), (number, codes[-1])
    assert not bucket.uploads()
    assert {code for pair in codes for code in pair} <= {0, 3, 4}
    return codes


def test_of_two_runs_one_publishes_and_the_other_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    codes = race(bucket, tmp_path / "out")
    assert all(0 in pair and pair != (0, 0) for pair in codes)


def test_two_resumed_runs_go_on_with_the_same_output(bucket: Bucket, tmp_path: Path) -> None:
    codes = race(bucket, tmp_path / "out", resume=True)
    assert all(0 in pair for pair in codes)
    assert (0, 0) in codes, "both have joined one claim"


def test_two_finishes_publish_once(bucket: Bucket, tmp_path: Path) -> None:
    codes = race(bucket, tmp_path / "out", parts=2, work=Finish())
    assert all(0 in pair for pair in codes)
