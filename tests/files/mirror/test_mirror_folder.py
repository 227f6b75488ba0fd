"""A folder of a bucket becomes a folder on the disk: small files at once, weights where they are read."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import time

import numpy as np
import pytest

from llmconv.errors import InputRefused, MalformedInput
from llmconv.files import mirror
from llmconv.files.mirror import CHUNK, CHUNK_FILE
from llmconv.files.safetensors_file import read_header
from llmconv.files.source_file import open_source, read_into
from llmconv.files.sources import fetching, local_path
from tests.stores.reading_bucket import Bucket

MEBIBYTE = 1 << 20
LARGE = 30 * MEBIBYTE + 5


@pytest.fixture(autouse=True)
def removed() -> Iterator[None]:
    with fetching():
        yield


def noise(size: int) -> bytes:
    return np.random.default_rng(0).bytes(size)


def data(path: Path, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    read_into(path, memoryview(buffer), start)
    return bytes(buffer)


@pytest.mark.slow
def test_a_large_object_is_a_file_of_its_size_that_was_not_fetched(bucket: Bucket) -> None:
    path = local_path(bucket.put("sparse/x.pt", noise(LARGE)), in_parts=True)
    assert (path.name, path.stat().st_size) == ("x.pt", LARGE)
    assert bucket.requests() == [("HEAD", "sparse/x.pt")]


@pytest.mark.slow
def test_a_read_fetches_the_chunks_around_it(bucket: Bucket) -> None:
    content = noise(LARGE)
    path = local_path(bucket.put("chunks/x.pt", content), in_parts=True)
    assert data(path, 9 * MEBIBYTE, 9 * MEBIBYTE + 100) == content[9 * MEBIBYTE :][:100]
    assert bucket.requests().count(("GET", "chunks/x.pt")) == 1


@pytest.mark.slow
def test_what_was_read_is_not_fetched_again(bucket: Bucket) -> None:
    content = noise(LARGE)
    path = local_path(bucket.put("again/x.pt", content), in_parts=True)
    assert data(path, 5, LARGE) == data(path, 5, LARGE) == content[5:]
    assert bucket.requests().count(("GET", "again/x.pt")) == 4


@pytest.mark.slow
def test_reading_in_order_fetches_ahead(bucket: Bucket) -> None:
    content = noise(LARGE)
    path = local_path(bucket.put("ahead/x.pt", content), in_parts=True)
    assert (
        data(path, 0, 10) + data(path, 8 * MEBIBYTE, 8 * MEBIBYTE + 10) == content[:10] + content[8 * MEBIBYTE :][:10]
    )
    assert data(path, LARGE - 10, LARGE) == content[-10:]
    assert bucket.requests().count(("GET", "ahead/x.pt")) == 4


def test_at_the_limit_chunks_not_read_for_long_make_room_for_others(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHUNK_FILE, "limit", 0)
    content = noise(LARGE)
    path = local_path(bucket.put("limited/x.pt", content), in_parts=True)
    again = 2  # chunk 2 made room for chunk 3, which now makes room for 2, but is requested as the one that follows
    for number, requests in ((0, 1), (2, 1), (0, 0), (3, 1), (0, 0), (2, again)):
        assert data(path, number * CHUNK, number * CHUNK + 100) == content[number * CHUNK :][:100]
        assert bucket.requests().count(("GET", "limited/x.pt")) == requests


def test_readers_that_need_more_chunks_than_the_limit_get_all_bytes(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHUNK_FILE, "limit", 0)
    content = noise(LARGE)
    path = local_path(bucket.put("crowded/x.pt", content), in_parts=True)
    with ThreadPoolExecutor(8) as pool:
        places = [place * MEBIBYTE for place in range(29)] * 4
        assert all(pool.map(lambda at: data(path, at, at + MEBIBYTE) == content[at : at + MEBIBYTE], places))


@pytest.mark.slow
def test_many_files_that_are_read_together_lose_no_chunk_in_use(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHUNK_FILE, "limit", 0)
    monkeypatch.setattr("llmconv.files.mirror.AHEAD_OF_ALL", 1)
    content = noise(LARGE)
    paths = [local_path(bucket.put(f"rank{rank}/x.pt", content), in_parts=True) for rank in range(6)]
    bucket.requests()
    for start in range(0, LARGE - MEBIBYTE, MEBIBYTE):
        assert all(data(path, start, start + MEBIBYTE) == content[start : start + MEBIBYTE] for path in paths)
    assert set(Counter(bucket.requests()).values()) == {4}


def test_a_fork_is_refused_what_its_parent_may_overwrite(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    path = local_path(bucket.put("forked/x.pt", noise(LARGE)), in_parts=True)
    data(path, 0, 10)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(RuntimeError, match="fork"):
        data(path, 0, 10)


@pytest.mark.slow
def test_the_disk_space_is_given_back_with_the_last_file(bucket: Bucket) -> None:
    with fetching():
        path = local_path(bucket.put("disk/x.pt", noise(LARGE)), in_parts=True)
        data(path, 0, LARGE)
        assert len(temporary_files()) == 1
    assert not temporary_files()


def temporary_files() -> list[str]:
    """Open files of this process that have no name."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(fd))
    return [name for name in found if name.startswith(tempfile.gettempdir()) and name.endswith("(deleted)")]


def test_the_header_of_a_shard_is_one_request_without_its_data(bucket: Bucket, tmp_path: Path) -> None:
    path = local_path(bucket.put("header/x.safetensors", one_tensor(5 * MEBIBYTE)), in_parts=True)
    assert list(read_header(path).tensors) == ["weight"]
    assert mirror.find(path)
    assert bucket.requests() == [("HEAD", "header/x.safetensors"), ("GET", "header/x.safetensors")]


def test_a_long_header_is_one_request_more(bucket: Bucket) -> None:
    content = one_tensor(5 * MEBIBYTE, padding=200_000)
    path = local_path(bucket.put("long/x.safetensors", content), in_parts=True)
    assert list(read_header(path).tensors) == ["weight"]
    assert bucket.requests().count(("GET", "long/x.safetensors")) == 2


def test_headers_of_any_number_of_shards_are_fetched_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "FILES_WITH_EDGES", 1)
    for name in "abc":
        bucket.put(f"many/{name}.safetensors", one_tensor(3 * MEBIBYTE))
    folder = local_path(bucket.uri("many"), in_parts=True)
    for path in [*folder.iterdir()] * 2:
        assert list(read_header(path).tensors) == ["weight"]
    assert len([key for method, key in bucket.requests() if method == "GET" and key]) == 3


def one_tensor(size: int, padding: int = 0) -> bytes:
    text = f'{{"weight":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode() + b" " * padding
    return len(text).to_bytes(8, "little") + text + noise(size)


@pytest.mark.slow
def test_other_code_that_opens_a_file_finds_all_of_it(bucket: Bucket) -> None:
    content = noise(LARGE)
    path = local_path(bucket.put("guarded/x.pt", content), in_parts=True)
    assert path.read_bytes() == content
    assert data(path, 7, 9) == content[7:9]


def test_a_file_that_is_opened_by_a_descriptor_or_a_link_is_complete_too(bucket: Bucket, tmp_path: Path) -> None:
    content = noise(3 * MEBIBYTE)
    path = local_path(bucket.put("linked/x.pt", content), in_parts=True)
    (tmp_path / "link").symlink_to(path)
    fd = os.open(tmp_path / "link", os.O_RDONLY)
    assert os.pread(fd, 100, MEBIBYTE) == content[MEBIBYTE:][:100]
    os.close(fd)


def test_without_in_parts_everything_is_fetched(bucket: Bucket) -> None:
    bucket.put("whole/config.json")
    content = noise(LARGE)
    bucket.put("whole/model.safetensors", content)
    folder = local_path(bucket.uri("whole"))
    assert mirror.find(folder / "model.safetensors") is None
    assert (folder / "model.safetensors").read_bytes() == content


def test_small_files_are_there_and_have_the_time_of_their_objects(bucket: Bucket) -> None:
    now = time()
    bucket.put("small/config.json", b'{"a": 1}')
    bucket.put("small/inner/empty.txt", b"")
    folder = local_path(bucket.uri("small/"), in_parts=True)
    assert (folder / "config.json").read_bytes() == b'{"a": 1}'
    assert (folder / "inner/empty.txt").read_bytes() == b""
    assert abs((folder / "config.json").stat().st_mtime - now) < 60


def test_a_pointer_file_is_followed_from_the_root_of_the_bucket(bucket: Bucket) -> None:
    content = noise(3 * MEBIBYTE)
    bucket.put("run/ep1.pt", content)
    bucket.put("run/latest.pt.symlink", b"run/ep1.pt")
    path = local_path(bucket.uri("run/latest.pt"), in_parts=True)
    assert path.name == "ep1.pt"
    assert data(path, 0, 100) == content[:100]


def test_an_object_that_does_not_exist_is_refused(bucket: Bucket, temporary: Path) -> None:
    with pytest.raises(InputRefused, match="`s3://bucket/nowhere` does not exist"):
        local_path(bucket.uri("nowhere"), in_parts=True)
    assert not [*temporary.iterdir()]


@pytest.mark.slow
def test_an_object_that_changes_is_refused(bucket: Bucket) -> None:
    path = local_path(bucket.put("changed/x.pt", noise(LARGE)), in_parts=True)
    data(path, 0, 10)
    bucket.put("changed/x.pt", b"1" * LARGE)
    with pytest.raises(InputRefused, match=r"`s3://bucket/changed/x.pt` changed while it was read"):
        data(path, LARGE - 10, LARGE)
    with pytest.raises(InputRefused, match="changed while it was read"):
        path.read_bytes()


def test_a_range_beyond_the_end_is_refused(bucket: Bucket) -> None:
    path = local_path(bucket.put("short/x.pt", noise(3 * MEBIBYTE)), in_parts=True)
    with pytest.raises(MalformedInput, match="ends at byte 3145728, 1 bytes early"):
        data(path, 10, 3 * MEBIBYTE + 1)


@pytest.mark.slow
def test_a_store_that_is_busy_and_breaks_off_changes_no_byte(faulty: Bucket) -> None:
    content = noise(LARGE)
    path = local_path(faulty.put("faults/x.pt", content), in_parts=True)
    with open_source(path) as file:
        assert file.read() == content
    assert data(path, 0, LARGE) == content
