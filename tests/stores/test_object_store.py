"""Objects on a real S3 server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from llmconv.addresses import parse_address
from llmconv.errors import InputRefused, LlmconvError, OutputFailed, UnsupportedInput
from llmconv.stores import object_store
from llmconv.stores.object_store import MEBIBYTE, ObjectStore, part_bytes
from tests.stores.bucket import Bucket
from tests.stores.server import KEY, SECRET


@pytest.fixture
def store(bucket: Bucket) -> ObjectStore:
    return ObjectStore(parse_address(str(bucket)))


def blocks(count: int, stop: int | None = None) -> Iterator[memoryview]:
    """`count` MiB; an error of the source after `stop`."""
    for number in range(count):
        if number == stop:
            raise InputRefused("the source is damaged", hint="none")
        yield memoryview(bytes([number]) * MEBIBYTE)


def test_an_object_written_in_parts_is_the_sum_of_its_blocks(store: ObjectStore, bucket: Bucket) -> None:
    e_tag = store.write("a/b", blocks(20), 20 * MEBIBYTE)
    head = store.head("a/b")
    assert head and (head.size, bool(e_tag)) == (20 * MEBIBYTE, True)
    assert bucket.files("a")["b"] == b"".join(blocks(20))
    assert [found.key for found in store.list("a")] == ["a/b"]


def test_a_range_is_read_of_the_object_that_was_listed(store: ObjectStore) -> None:
    store.write("x", b"0123456789", 10)
    head = store.head("x")
    assert head and store.read_range(head, 3, 7) == b"3456"
    store.write("x", b"9876543210", 10)
    with pytest.raises(InputRefused, match="changed while it was read"):
        store.read_range(head, 3, 7)


def test_an_error_of_the_source_leaves_no_object_and_no_upload(store: ObjectStore, bucket: Bucket) -> None:
    with pytest.raises(InputRefused, match="the source is damaged"):
        store.write("x", blocks(20, stop=17), 20 * MEBIBYTE)
    assert store.head("x") is None
    assert not bucket.uploads()


def test_empty_objects_in_the_place_of_folders_are_no_files() -> None:
    keys = {"a/m": 0, "a/m/logs": 0, "a/m/logs/x": 3, "a/m/config.json": 2, "a/m/empty.txt": 0}
    heads = [object_store.Head(key, size, "", 0) for key, size in keys.items()]
    found = [head.key for head in object_store.without_markers(heads, "a/m")]
    assert found == ["a/m/logs/x", "a/m/config.json", "a/m/empty.txt"]


def test_a_listing_without_an_end_is_refused(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        store.write(name, b"1", 1)
    monkeypatch.setattr(object_store, "MOST_OBJECTS", 3)
    assert len([*store.list()]) == 3
    monkeypatch.setattr(object_store, "MOST_OBJECTS", 2)
    with pytest.raises(InputRefused, match="has more than 2 objects"):
        [*store.list()]


@pytest.mark.slow
def test_a_fork_of_a_process_that_used_a_store_is_refused_and_does_not_wait(store: ObjectStore, bucket: Bucket) -> None:
    assert store.head("x") is None
    if not (child := os.fork()):
        signal.alarm(20)
        try:
            ObjectStore(parse_address(str(bucket))).head("x")
        except LlmconvError as error:
            os._exit(error.exit_code)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == UnsupportedInput.exit_code


def test_an_object_is_created_once(store: ObjectStore) -> None:
    assert store.create("claim", b"1")
    assert not store.create("claim", b"2")
    assert store.read("claim", 10) == b"1"


def test_a_store_without_conditions_is_asked_before_an_object_is_created(store: ObjectStore, bucket: Bucket) -> None:
    bucket.set_faults(careless=True)
    assert store.create("claim", b"1") and not store.create("claim", b"2")
    assert store.read("claim", 10) == b"1"
    assert not store.refuses_second("claim", b"1")


def test_what_does_not_exist_is_none_and_deleting_it_no_error(store: ObjectStore) -> None:
    store.delete(["nothing"])
    assert (store.head("nothing"), store.read("nothing", 10), [*store.list()]) == (None, None, [])


def test_an_object_larger_than_expected_is_not_read(store: ObjectStore) -> None:
    store.write("x", bytes(11), 11)
    with pytest.raises(InputRefused, match="11 bytes, 10 at most"):
        store.read("x", 10)


@pytest.mark.slow
def test_requests_of_a_busy_store_are_repeated(store: ObjectStore, bucket: Bucket) -> None:
    bucket.set_faults(busy=0.2, cut=0.3)
    store.write("x", blocks(40), 40 * MEBIBYTE)
    head = store.head("x")
    assert head
    read = b"".join(store.read_range(head, at * MEBIBYTE, (at + 8) * MEBIBYTE) for at in range(0, 40, 8))
    assert read == b"".join(blocks(40))


def test_a_listing_that_is_cut_short_is_repeated(store: ObjectStore, bucket: Bucket) -> None:
    for number in range(20):
        store.write(f"name-{number}", b"1", 1)
    bucket.set_faults(cut=0.5)
    for _ in range(5):
        assert len([*store.list()]) == 20


def test_denied_reads_are_refused_and_denied_writes_fail(store: ObjectStore, bucket: Bucket) -> None:
    bucket.set_faults(denied=["GET", "PUT", "POST"])
    with pytest.raises(InputRefused, match="denied"):
        store.read("x", 10)
    with pytest.raises(InputRefused, match="denied"):
        list(store.list())
    with pytest.raises(OutputFailed, match="denied"):
        store.write("x", b"1", 1)


def test_a_bucket_that_does_not_exist_is_refused_by_name(bucket: Bucket) -> None:
    store = ObjectStore(parse_address("s3://no-such-bucket/folder"))
    for use in (lambda: list(store.list()), lambda: store.write("x", b"1", 1)):
        with pytest.raises(InputRefused, match="there is no bucket `no-such-bucket`"):
            use()


def test_errors_show_no_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET + "-revoked")
    store = ObjectStore(parse_address(str(bucket)))
    with pytest.raises(LlmconvError) as caught:
        store.write("x", b"1", 1)
    shown = repr(caught.value) + caught.value.message + caught.value.hint + repr(store)
    assert SECRET not in shown and KEY not in shown


@pytest.mark.parametrize(("size", "part"), [(0, 8), (8 << 30, 8), (81_000 << 20, 9), (1 << 40, 117)])
def test_parts_grow_with_the_object_so_that_their_number_is_bounded(size: int, part: int) -> None:
    assert part_bytes(size) == part * MEBIBYTE
    assert size / part_bytes(size) <= 10_000
