"""Copying a file: the bytes, the sha256, the fallback where the kernel cannot, and clones on XFS."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.checkpoint import INDEX, Checkpoint, open_checkpoint
from llmconv.errors import MalformedInput, OutputFailed
from llmconv.files import copying
from llmconv.files.copying import can_clone
from llmconv.output.manifest import Manifest
from llmconv.output.plan import Plan, Shard, plan_checkpoint
from llmconv.output.writer import destination_of, write_checkpoint
from llmconv.tensors import BY_NAME, LazyTensor, in_memory


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """300,001 random bytes."""
    (tmp_path / "source").write_bytes(os.urandom(300_001))
    return tmp_path / "source"


def copy_file(source: Path, target: Path, advance: Callable[[int], None]) -> dict[str, Any]:
    """`copying.copy_file` into a new file called `target`."""
    with open(target, "w+b", buffering=0) as made:
        return copying.copy_file(source, made, advance)


def entry(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture(params=["kernel", "other disks", "old kernel", "no call", "stops half way"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `copy_file_range` does, without clones."""
    call = os.copy_file_range

    def answer(source: int, target: int, count: int, begin: int, end: int) -> int:
        code = {"other disks": 18, "no call": 38}.get(request.param)
        if code:
            raise OSError(code, os.strerror(code))
        if request.param == "old kernel" or (request.param == "stops half way" and begin):
            return 0
        return call(source, target, min(count, 7000), begin, end)

    monkeypatch.setattr(os, "copy_file_range", answer)
    monkeypatch.setattr(copying, "FICLONE", 0)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("chunk", [1 << 30, 100_000, 300_001])
def test_every_byte_is_copied_and_hashed(
    chunk: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "COPY_BYTES", chunk)
    monkeypatch.setattr(copying, "READ_BYTES", 999)
    (tmp_path / "target").write_bytes(b"older and longer" * 50_000)
    done: list[int] = []
    assert copy_file(source, tmp_path / "target", done.append) == entry(source.read_bytes())
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert sum(done) == 300_001


def test_an_empty_file_is_copied(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert copy_file(tmp_path / "empty", tmp_path / "target", print) in (entry(b""), clone_entry(0, "empty"))


def clone_entry(size: int, name: str) -> dict[str, Any]:
    return {"bytes": size, "clone_of": name}


@pytest.mark.usefixtures("kernel")
def test_a_source_that_shrinks_is_hashed_as_it_was_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "COPY_BYTES", 100_000)
    found = copy_file(source, tmp_path / "target", lambda count: os.truncate(source, 150_000))
    assert found == entry((tmp_path / "target").read_bytes())
    assert found["bytes"] < 300_001


def test_a_full_disk_is_an_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "FICLONE", 0)
    with pytest.raises(OSError, match="No space left"):
        copying._copy(os.open(source, os.O_RDONLY), os.open("/dev/full", os.O_RDWR), 300_001, print)


def test_where_nothing_can_be_cloned_nothing_is_said_to_be(tmp_path: Path) -> None:
    assert not can_clone(tmp_path / "missing", tmp_path)
    assert not can_clone(Path("/proc/self/status"), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def xfs() -> Iterator[Path]:
    """A file system that clones."""
    home = Path(tempfile.mkdtemp())
    with open(home / "image", "wb") as file:
        file.truncate(320 << 20)
    (home / "xfs").mkdir()
    commands = [["mkfs.xfs", "-q", f"{home}/image"], ["mount", "-o", "loop", f"{home}/image", f"{home}/xfs"]]
    able = shutil.which("mkfs.xfs") and all(
        subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands
    )
    if able:
        yield home / "xfs"
        subprocess.run(["umount", home / "xfs"], check=True)
    shutil.rmtree(home)
    if not able:
        pytest.skip("mounting a file system that clones needs root and xfsprogs")


def test_a_clone_takes_no_space_and_is_not_read(xfs: Path) -> None:
    content = os.urandom(40 << 20)
    (xfs / "source").write_bytes(content)
    os.sync()
    free = shutil.disk_usage(xfs).free
    assert can_clone(xfs / "source", xfs)
    assert copy_file(xfs / "source", xfs / "target", print) == clone_entry(40 << 20, "source")
    assert free - shutil.disk_usage(xfs).free < 4 << 20
    assert (xfs / "target").read_bytes() == content


def test_a_clone_stays_when_its_source_changes(xfs: Path) -> None:
    (xfs / "a").write_bytes(b"before" * 5000)
    copy_file(xfs / "a", xfs / "b", print)
    (xfs / "a").write_bytes(b"after!" * 5000)
    assert (xfs / "b").read_bytes() == b"before" * 5000


def test_between_two_disks_it_is_a_copy(xfs: Path, source: Path) -> None:
    assert not can_clone(source, xfs)
    assert copy_file(source, xfs / "copy", print) == entry(source.read_bytes())


def test_a_run_that_failed_after_cloning_is_resumed(xfs: Path) -> None:
    def fail(start: int, stop: int) -> Any:
        raise OSError(5, "Input/output error")

    float32 = BY_NAME["float32"]
    tensors = {name: in_memory(np.arange(20, dtype=np.float32), float32) for name in ("a", "b")}
    write(xfs / "base", Checkpoint(xfs, "test", tensors, {}))
    base = open_checkpoint(xfs / "base")
    with pytest.raises(OutputFailed):
        write(xfs / "out", replace(base, tensors={**base.tensors, "b": LazyTensor(float32, (20,), fail)}))
    changed = replace(base, tensors={**base.tensors, "b": in_memory(np.ones(20, np.float32), float32)})
    manifest = write(xfs / "out", changed, resume=True)
    assert manifest.files["model-00001-of-00002.safetensors"]["clone_of"] == "model-00001-of-00002.safetensors"
    assert (xfs / "out" / INDEX).read_bytes() == (xfs / "base" / INDEX).read_bytes()
    assert {name: tensor.read()[-1] for name, tensor in open_checkpoint(xfs / "out").items()} == {"a": 19, "b": 1}


def write(folder: Path, checkpoint: Checkpoint, *, resume: bool = False) -> Manifest:
    return write_checkpoint(plan_checkpoint(checkpoint, 100), folder, steps=[], sources=[], resume=resume)


def test_clones_need_no_space(xfs: Path) -> None:
    vast = Shard("vast", {"t": LazyTensor(BY_NAME["uint8"], (1 << 40,), lambda start, stop: np.zeros(0))})
    (xfs / "file").write_bytes(bytes(5000))
    plan = Plan(Checkpoint(xfs, "test", {}, {}), (replace(vast, copy_of=xfs / "file"),))
    assert destination_of(xfs / "out").space_needed(plan) == 0
    assert destination_of(xfs.parent / "out").space_needed(plan) == 1 << 40


@pytest.mark.parametrize("damaged", [False, True])
def test_a_large_file_of_the_hubs_cache_has_the_sha256_that_it_is_named_by(damaged: bool, tmp_path: Path) -> None:
    """huggingface_hub compares the size of a download only."""
    content = b"weights" * 1000
    blob = tmp_path / "models--org--name/blobs" / hashlib.sha256(content).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.write_bytes(content[:-1] + b"x" if damaged else content)
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    with open(tmp_path / "out", "w+b") as made:
        if damaged:
            with pytest.raises(MalformedInput, match="in the hub's cache is damaged") as refused:
                copying.copy_file(link, made, lambda _: None)
            assert str(blob) in refused.value.hint
        else:
            assert copying.copy_file(link, made, lambda _: None)["bytes"] == len(content)
