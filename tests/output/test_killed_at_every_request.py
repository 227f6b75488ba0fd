"""SIGKILL at every third request that changes a store, at every one with `ROWS=all`: no output or all of it.

`--resume` completes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmconv.output.store_folder import DONE, clean
from llmconv.output.work import Finish, Part
from tests.builders.shard_outputs import five, large, write, written
from tests.stores.bucket import Bucket

pytestmark = pytest.mark.slow

LATE = pytest.mark.parametrize("late", [True, False], ids=["after", "before"])
"""Whether the request is carried out; a store before a request is as after the one before it."""
REQUESTS = range(1, 1000, 1 if os.environ.get("ROWS") == "all" else 3)


def kill(bucket: Bucket, at: int, *, late: bool, options: tuple[str, ...] = ()) -> bool:
    """Kills a run at a request; False if it has ended before."""
    bucket.set_faults(hold=at, late=late)
    command = [sys.executable, "-m", "tests.builders.shard_outputs", f"{bucket}/out", *options]
    with subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2]) as process:
        held = bucket.wait_until_held(process)
        process.kill()
    bucket.set_faults()
    return held


def killed(bucket: Bucket, *, late: bool) -> Iterator[Bucket]:
    """Of every request, a folder in the bucket whose run was killed there."""
    for at in REQUESTS:
        folder = replace(bucket, prefix=f"{bucket.prefix}/{at}")
        if not kill(folder, at, late=late):
            assert at > 20, "the run has more requests"
            return
        yield folder


def recorded(bucket: Bucket) -> list[str]:
    """Names of the shards in the journal."""
    found = bucket.files()
    return [json.loads(found[name])["file"] for name in found if name.startswith(f"{DONE}/")]


@pytest.mark.one_row_in(2)
@LATE
def test_a_killed_run_is_invisible_or_complete(late: bool, bucket: Bucket, tmp_path: Path) -> None:
    write(large(), tmp_path / "out")
    expected, visible = written(tmp_path / "out"), 0
    for folder in killed(bucket, late=late):
        found = folder.files()
        if "llmconv.json" in found:
            visible += 1
            assert {name: found[name] for name in found if ".llmconv/" not in name} == expected
    assert visible >= 4 // REQUESTS.step, "the last requests delete the journal"


@pytest.mark.one_row_in(2)
@LATE
def test_resume_completes_a_killed_run_and_reads_no_recorded_shard(late: bool, bucket: Bucket, tmp_path: Path) -> None:
    write(large(), tmp_path / "out")
    for folder in killed(bucket, late=late):
        done, read, published = recorded(folder), list[str](), "llmconv.json" in folder.files()
        write(large(read), f"{folder}/out", resume=True)
        assert folder.files() == written(tmp_path / "out")
        again = {name for name in done if any(f"{name}?" in line or line.endswith(name) for line in folder.changes())}
        assert not again
        # of a complete output the sources are compared
        assert published or {f"t{int(name[6:11]) - 1}" for name in done}.isdisjoint(read)


@pytest.mark.one_row_in(2)
@LATE
def test_a_killed_part_is_run_again_and_finished(late: bool, bucket: Bucket, tmp_path: Path) -> None:
    write(large(), tmp_path / "out")
    for at in REQUESTS:
        folder = replace(bucket, prefix=f"{bucket.prefix}/{at}")
        if not kill(folder, at, late=late, options=("part",)):
            break
        assert "llmconv.json" not in folder.files()
        for part in (Part(0, 2), Part(1, 2)):
            write(large(), f"{folder}/out", work=part)
        write(large(), f"{folder}/out", work=Finish())
        assert folder.files() == written(tmp_path / "out"), at
    assert at > 8


@pytest.mark.one_row_in(2)
@LATE
def test_a_killed_finish_is_run_again_with_resume(late: bool, bucket: Bucket, tmp_path: Path) -> None:
    write(large(), tmp_path / "out")
    for at in REQUESTS:
        folder = replace(bucket, prefix=f"{bucket.prefix}/{at}")
        write(large(), f"{folder}/out", work=Part(0, 1))
        if not kill(folder, at, late=late, options=("finish",)):
            break
        write(large(), f"{folder}/out", work=Finish(), resume=True)
        assert folder.files() == written(tmp_path / "out"), at
    assert at > 8


@pytest.mark.one_row_in(2)
@LATE
def test_clean_leaves_nothing_of_a_killed_run(late: bool, bucket: Bucket) -> None:
    for folder in killed(bucket, late=late):
        published = "llmconv.json" in folder.files()
        clean(f"{folder}/out")
        left = folder.files()
        assert ("llmconv.json" in left, any(".llmconv/" in name for name in left)) == (published, False)
        assert published or not left
        assert not folder.uploads()


@pytest.mark.one_row_in(2)
@LATE
def test_resume_leaves_nothing_of_the_output_that_a_killed_run_was_to_replace(
    late: bool, bucket: Bucket, tmp_path: Path
) -> None:
    write(large(), tmp_path / "out")
    for at in REQUESTS:
        folder = replace(bucket, prefix=f"{bucket.prefix}/{at}")
        write(five(), f"{folder}/out")
        if not kill(folder, at, late=late, options=("overwrite",)):
            break
        old = folder.files().get("llmconv.json") not in (None, written(tmp_path / "out")["llmconv.json"])
        write(large(), f"{folder}/out", resume=True, overwrite=old)
        assert folder.files() == written(tmp_path / "out"), at
    assert at > 28
