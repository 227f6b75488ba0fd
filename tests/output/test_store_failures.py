"""Stores that are full, deny access, hang or ignore conditions: one clear error, and `--resume` completes it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmconv.addresses import parse_address
from llmconv.convert import to_hf
from llmconv.errors import LlmconvError, OutputFailed
from llmconv.output.store_folder import CLAIM, clean
from llmconv.output.work import Finish, Part, Work, Workers
from llmconv.stores.object_store import ObjectStore
from tests.builders.hf_models import LLAMA, save_model
from tests.builders.shard_outputs import five, large, sample, write, written
from tests.stores.bucket import Bucket
from tests.stores.server import KEY, SECRET

FULL = pytest.mark.parametrize(
    "full",
    [
        (400, "EntityTooLarge"),
        (403, "QuotaExceeded"),
        pytest.param((507, "InsufficientStorage"), marks=pytest.mark.slow),
    ],
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", LLAMA, {"tokenizer.json": b"{}"})


def start(model: Path | str, bucket: Bucket, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "llmconv", "to-hf", str(model), "-o", f"{bucket}/out", "--max-shard-size", "8KB"]
    return subprocess.Popen([*command, *options], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def failed(run: Any) -> OutputFailed:
    """The error of a run, which shows no credential."""
    with pytest.raises(OutputFailed) as caught:
        run()
    shown = caught.value.message + caught.value.hint
    assert SECRET not in shown and KEY not in shown and "\n" not in shown
    return caught.value


@pytest.mark.quick_rows("full1")
@FULL
def test_a_full_store_is_named_and_resume_goes_on_after_space_is_made(
    full: tuple[int, str], bucket: Bucket, tmp_path: Path
) -> None:
    bucket.set_faults(full=full, room=9)
    error = failed(lambda: write(sample(), f"{bucket}/out"))
    assert "no space left in the store" in error.message and "--resume" in error.hint
    assert "llmconv.json" not in bucket.files() and not bucket.uploads()
    bucket.set_faults()
    write(sample(), f"{bucket}/out", resume=True)
    write(sample(), tmp_path / "out")
    assert bucket.files() == written(tmp_path / "out")


def test_a_store_that_is_full_from_the_start_keeps_nothing(bucket: Bucket) -> None:
    bucket.set_faults(full=(403, "QuotaExceeded"))
    failed(lambda: write(sample(), f"{bucket}/out"))
    assert (bucket.files(), bucket.uploads()) == ({}, [])


@pytest.mark.slow
def test_credentials_that_are_revoked_at_any_request_fail_the_run_and_can_be_resumed(
    bucket: Bucket, tmp_path: Path
) -> None:
    write(sample(), tmp_path / "out")
    for count in range(1000):
        bucket.set_faults(revoked=count)
        try:
            write(sample(), f"{bucket}/{count}")
        except OutputFailed as error:
            assert "denied" in error.message and SECRET not in error.message + error.hint
        else:
            break
        bucket.set_faults()
        write(sample(), f"{bucket}/{count}", resume=True)
        assert bucket.files(str(count)) == written(tmp_path / "out"), count
    assert count >= 30, "requests of a run"


@pytest.mark.slow
@pytest.mark.parametrize("work", [Part(0, 2), Finish(), Workers(2)], ids=["part", "finish", "workers"])
def test_credentials_that_are_revoked_fail_a_part_workers_and_the_finish(
    work: Work, model: Path, bucket: Bucket, tmp_path: Path
) -> None:
    to_hf(model, tmp_path / "out", max_shard_size="8KB")
    for count in (0, 2, 5, 9, 15):
        out: dict[str, Any] = {"output": f"{bucket}/{count}", "max_shard_size": "8KB"}
        if isinstance(work, Finish):
            to_hf(model, **out, work=Part(0, 1))
        bucket.set_faults(revoked=count)
        assert "denied" in failed(lambda out=out: to_hf(model, **out, work=work)).message
        bucket.set_faults()
        to_hf(model, **out, resume=True)
        assert bucket.files(str(count)) == written(tmp_path / "out"), count


def test_credentials_that_are_revoked_while_a_source_is_read_fail_the_run(bucket: Bucket) -> None:
    store = ObjectStore(parse_address(str(bucket)))
    store.write("x", b"0123456789", 10)
    head = store.head("x")
    assert head and store.read_range(head, 0, 5) == b"01234"
    bucket.set_faults(denied=["GET"])
    assert "denied" in failed(lambda: store.read_range(head, 5, 10)).message


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hold", "options"),
    [
        (4, ()),
        *(pytest.param(hold, (), marks=pytest.mark.slow) for hold in (1, 8)),
        *(pytest.param(hold, ("--workers", "2"), marks=pytest.mark.slow) for hold in (1, 4, 8)),
    ],
)
def test_sigterm_ends_a_run_whose_store_hangs_within_seconds(
    hold: int, options: tuple[str, ...], model: Path, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.set_faults(hold=hold)
    with start(model, bucket, *options) as process:
        assert bucket.wait_until_held(process)
        process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        _, stderr = process.communicate()
    assert process.returncode == 143 and stderr.startswith("error: interrupted") and stderr.count("\n") == 3
    assert time.monotonic() - sent < 12
    bucket.set_faults()
    to_hf(model, f"{bucket}/out", max_shard_size="8KB", resume=True)
    to_hf(model, tmp_path / "out", max_shard_size="8KB")
    assert bucket.files() == written(tmp_path / "out")


@pytest.mark.slow
def test_sigterm_ends_a_run_whose_source_hangs_and_leaves_no_temporary_file(
    model: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    to_hf(model, f"{bucket}/source", max_shard_size="1MB")
    bucket.set_faults(mute=["HEAD"])
    with start(f"{bucket}/source", bucket) as process:
        assert bucket.wait_until_held(process)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 143
    assert not [*(tmp_path / "tmp").iterdir()]


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--workers", "2")], ids=["alone", "workers"])
def test_sigterm_in_the_middle_of_an_upload_leaves_none_open(
    options: tuple[str, ...], bucket: Bucket, tmp_path: Path
) -> None:
    bucket.set_faults(delay=0.5)
    model = save_model(tmp_path / "model", {**LLAMA, "vocab_size": 400_000})
    with start(model, bucket, *options) as process:
        while not bucket.uploads() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 143
    assert not bucket.uploads()


def test_a_second_run_is_refused_by_a_store_without_conditions(bucket: Bucket) -> None:
    bucket.set_faults(careless=True)
    with pytest.raises(OutputFailed):
        write(sample(OSError("lost")), f"{bucket}/out")
    before = bucket.files()
    with pytest.raises(OutputFailed, match="another run is writing"):
        write(sample(extra=1), f"{bucket}/out")
    assert bucket.files() == before


@pytest.mark.parametrize("options", [("--workers", "2"), ("--part", "0/1")], ids=["workers", "part"])
def test_a_store_without_conditions_is_named_once(options: tuple[str, ...], model: Path, bucket: Bucket) -> None:
    bucket.set_faults(careless=True)
    with start(model, bucket, *options) as process:
        _, stderr = process.communicate()
    assert process.returncode == 0
    assert stderr.count("cannot refuse a second writer") == 1


def test_what_a_run_left_that_was_killed_after_it_had_published_is_deleted_by_resume(bucket: Bucket) -> None:
    write(sample(), f"{bucket}/out")
    before = bucket.files()
    ObjectStore(parse_address(f"{bucket}/out")).write(CLAIM, b'{"key": "x", "files": []}', 25)
    write(sample(), f"{bucket}/out", resume=True)
    assert bucket.files() == before


def kill_overwrite(bucket: Bucket) -> None:
    """Kills a run that replaces another output, when it has deleted some of it."""
    write(five(), f"{bucket}/out")
    bucket.set_faults(hold=7)
    command = [sys.executable, "-m", "tests.builders.shard_outputs", f"{bucket}/out", "overwrite"]
    with subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2]) as process:
        assert bucket.wait_until_held(process)
        process.kill()
    bucket.set_faults()
    assert "vocab.json" in bucket.files() and "llmconv.json" not in bucket.files()


@pytest.mark.slow
def test_a_killed_overwrite_is_completed_without_files_of_the_old_output(bucket: Bucket, tmp_path: Path) -> None:
    kill_overwrite(bucket)
    write(large(), f"{bucket}/out", resume=True)
    write(large(), tmp_path / "out")
    assert bucket.files() == written(tmp_path / "out")


@pytest.mark.slow
def test_clean_also_deletes_what_a_killed_run_was_to_replace(bucket: Bucket) -> None:
    kill_overwrite(bucket)
    clean(f"{bucket}/out")
    assert bucket.files() == {}


def test_clean_also_deletes_the_small_files_of_a_run_that_failed(bucket: Bucket) -> None:
    bucket.set_faults(full=(400, "EntityTooLarge"), room=15)
    failed(lambda: write(sample(), f"{bucket}/out"))
    assert {"tokenizer.json", CLAIM} <= bucket.files().keys()
    bucket.set_faults()
    clean(f"{bucket}/out")
    assert bucket.files() == {}


def test_a_run_that_joined_another_and_is_refused_leaves_it_its_files(bucket: Bucket) -> None:
    with pytest.raises(OutputFailed):
        write(sample(OSError("lost")), f"{bucket}/out")
    before = bucket.files()
    with pytest.raises(LlmconvError):
        write(sample(LlmconvError("refused", hint="none")), f"{bucket}/out", resume=True)
    assert bucket.files() == before


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--workers", "2")], ids=["alone", "workers"])
def test_a_busy_store_is_read_and_written_at_once_without_a_changed_byte(
    options: tuple[str, ...], bucket: Bucket, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model", {**LLAMA, "vocab_size": 20_000})
    to_hf(model, f"{bucket}/source", max_shard_size="1GB")
    bucket.set_faults(busy=0.2, cut=0.3)
    with start(f"{bucket}/source", bucket, *options) as process:
        _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    to_hf(model, tmp_path / "out", max_shard_size="8KB")
    shards = {name: content for name, content in written(tmp_path / "out").items() if name.endswith(".safetensors")}
    found = bucket.files()
    assert {name: found.get(name) for name in shards} == shards
