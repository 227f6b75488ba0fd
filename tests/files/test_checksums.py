"""Checksums of records: combined from parts read in any order and by any thread, and always compared completely."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmconv.checkpoint import Checkpoint, transposed
from llmconv.convert.algebra import slice_rows
from llmconv.errors import MalformedInput
from llmconv.files.source_file import ChecksummedRange, checked_reading, combine
from llmconv.files.torch_reader import open_torch_file
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import write_checkpoint
from llmconv.tensors import LazyTensor

MATRIX = torch.arange(3000, dtype=torch.float32).reshape(60, 50)


@pytest.mark.slow
@given(st.binary(max_size=40), st.binary(max_size=40))
def test_the_checksum_of_two_parts_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 40)), max_size=30), st.booleans())
def test_reads_in_any_order_and_overlapping_find_a_changed_byte(spans: list[tuple[int, int]], damaged: bool) -> None:
    data = bytes(range(100))
    record = ChecksummedRange(Path("x.pt"), "data/0", 0, 100, zlib.crc32(data) ^ damaged)
    found = False
    with checked_reading() as checks:
        try:
            for start, length in [*spans, (0, 100)]:
                record.was_read(start, memoryview(data[start : start + length]))
        except MalformedInput:
            found = True
        assert found == damaged
        assert found or checks.of(record).complete


@pytest.mark.slow
def test_threads_that_read_blocks_find_a_changed_byte() -> None:
    data = os.urandom(1 << 20)
    for damage in (0, 1):
        record = ChecksummedRange(Path("x.pt"), "data/0", 0, len(data), zlib.crc32(data) ^ damage)
        with checked_reading() as checks, ThreadPoolExecutor(8) as pool:
            reads = [
                pool.submit(copy_context().run, record.was_read, start, memoryview(data[start : start + 1024]))
                for start in range(0, len(data), 1024)
            ]
            assert sum(read.exception() is not None for read in reads) == damage
            assert checks.of(record).complete != damage


def test_nothing_is_counted_outside_a_checked_reading(tmp_path: Path) -> None:
    ChecksummedRange(tmp_path / "absent", "data/0", 0, 3, 0).was_read(0, memoryview(b"abc"))
    with checked_reading() as checks:
        checks.finish()


VIEWS: dict[str, Callable[[LazyTensor], LazyTensor]] = {
    "the whole": lambda tensor: tensor,
    "some rows": lambda tensor: slice_rows(tensor, 20, 30),
    "transposed while writing": transposed,
}
SAVED = {
    "contiguous": MATRIX,
    "transposed": MATRIX.t(),
    "columns": MATRIX[:, 3:7],
    "rows": MATRIX[10:20],
}


def convert(path: Path, output: Path, view: Callable[[LazyTensor], LazyTensor]) -> None:
    """Writes a view of the tensor `a` of a torch file."""
    file = open_torch_file(path)
    checkpoint = Checkpoint(path, "torch", {"a": view(file.tensor("a", file.content["a"]))}, {})
    write_checkpoint(plan_checkpoint(checkpoint), output, steps=[], sources=[path])


def flip(path: Path, position: int) -> None:
    """Changes one bit of the first storage."""
    data = bytearray(path.read_bytes())
    data[open_torch_file(path).records["0"].start + position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("position", [0, 6000, 11999])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("saved", SAVED)
def test_a_changed_byte_anywhere_in_a_record_that_is_used_is_refused(
    tmp_path: Path, saved: str, view: str, position: int
) -> None:
    if saved in ("columns", "rows") and view == "some rows":
        view = "the whole"
    path = tmp_path / "x.pt"
    torch.save({"a": SAVED[saved]}, path)
    convert(path, tmp_path / "good", VIEWS[view])
    flip(path, position)
    with pytest.raises(MalformedInput, match="CRC-32 mismatch in `data/0`"):
        convert(path, tmp_path / "bad", VIEWS[view])
    assert {entry.name for entry in tmp_path.iterdir()} == {"x.pt", "good"}


def test_an_unread_record_may_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"unused": torch.ones(100), "a": MATRIX}, path)
    flip(path, 5)
    convert(path, tmp_path / "out", lambda tensor: tensor)
    assert (tmp_path / "out/model.safetensors").is_file()


def test_a_file_saved_without_checksums_is_read_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": MATRIX}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    convert(path, tmp_path / "out", lambda tensor: tensor)
    assert MATRIX.numpy().tobytes() in (tmp_path / "out/model.safetensors").read_bytes()
    assert "warning: `x.pt` was saved without checksums" in capsys.readouterr().err


def test_one_record_without_a_checksum_among_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": MATRIX}, path)
    crc = zlib.crc32(MATRIX.numpy().tobytes()).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(crc, bytes(4)))
    with pytest.raises(MalformedInput, match="CRC-32 mismatch"):
        convert(path, tmp_path / "out", lambda tensor: tensor)
