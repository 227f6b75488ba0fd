"""Written torch files: torch, zip tools and the reader of llmconv find the same tensors in them."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UnsupportedInput
from llmconv.files.pickle_reader import STORAGES
from llmconv.files.torch_reader import open_torch_file
from llmconv.files.torch_writer import ALIGNMENT, PickledCall, PickledName, pickle_pieces, torch_pieces
from llmconv.output.plan import Plan, Shard
from llmconv.output.writer import write_checkpoint
from llmconv.tensors import BY_NAME, LazyTensor, in_memory

F32 = BY_NAME["float32"]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def random(shape: tuple[int, ...], dtype: str) -> LazyTensor:
    """A seeded tensor; a scalar stays one."""
    kind = BY_NAME[dtype]
    values = (np.random.default_rng(0).standard_normal(shape or (1,)) * 50).astype(kind.numpy)
    return LazyTensor(kind, shape, lambda start, stop: values[start:stop])


def write(folder: Path, tensors: Mapping[str, LazyTensor], **options: Any) -> Path:
    """Writes them as one torch file."""
    shard = Shard("x.pth", tensors, partial(torch_pieces, **options))
    write_checkpoint(Plan(Checkpoint(folder, "test", tensors, {}), (shard,)), folder, steps=[], sources=[])
    return folder / "x.pth"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(kinds=st.lists(st.tuples(SHAPES, st.sampled_from(sorted(set(STORAGES.values())))), min_size=1, max_size=6))
def test_torch_reads_the_same_tensors(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[tuple[int, ...], str]]
) -> None:
    tensors = {f"t{number}": random(*kind) for number, kind in enumerate(kinds)}
    path = write(tmp_path_factory.mktemp("torch") / "out", tensors)
    for mapped in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mapped)
        assert list(loaded) == list(tensors)
        for name, tensor in tensors.items():
            assert (tuple(loaded[name].shape), str(loaded[name].dtype)) == (tensor.shape, f"torch.{tensor.dtype.name}")
            assert loaded[name].is_contiguous()
            assert loaded[name].reshape(-1).view(torch.uint8).numpy().tobytes() == tensor.read().tobytes()


def test_our_own_reader_finds_the_same_tensors(tmp_path: Path) -> None:
    tensors = {"a": random((3, 2), "bfloat16"), "ä": random((), "int64")}
    file = open_torch_file(write(tmp_path / "out", tensors, inside=("model", "ema")))
    for name, ref in file.content["model"]["ema"].items():
        assert file.tensor(name, ref).read().tobytes() == tensors[name].read().tobytes()


def test_every_member_has_its_crc_and_starts_where_vector_loads_like_it(tmp_path: Path) -> None:
    path = write(tmp_path / "out", {f"t{rows}": random((rows, 2), "float32") for rows in (1, 7, 1000)})
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            lengths = data[info.header_offset + 26 : info.header_offset + 30]
            start = (
                info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            )
            assert start % ALIGNMENT == 0
            behind = data[start + info.file_size :]
            assert behind[:8] == b"PK\7\x08" + zlib.crc32(data[start : start + info.file_size]).to_bytes(4, "little")


def test_the_layout_is_that_of_torch(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3, 2)}, buffer)
    path = write(tmp_path / "out", {"a": in_memory(np.ones((3, 2), np.float32), F32)})
    with zipfile.ZipFile(buffer) as theirs, zipfile.ZipFile(path) as ours:
        names = {info.filename: info.flag_bits for info in theirs.infolist()}
        assert {info.filename: info.flag_bits for info in ours.infolist()}.items() <= names.items()
        assert ours.read("archive/data/0") == theirs.read("archive/data/0")
        operations = [
            [(code.name, value) for code, value, _ in pickletools.genops(archive.read("archive/data.pkl"))]
            for archive in (theirs, ours)
        ]
    globals_of = [{value for name, value in each if name == "GLOBAL"} for each in operations]
    assert globals_of[0] == globals_of[1]


def test_an_element_type_that_torch_has_no_storage_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="`t` is float8_e4m3fn"):
        write(tmp_path / "out", {"t": random((2, 2), "float8_e4m3fn")})
    assert not (tmp_path / "out").exists()


def write_sparse(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Writes tensors of zeros as holes in the file."""
    crcs: list[int] = []
    with open(path, "wb") as file:
        for piece in torch_pieces(tensors):
            if isinstance(piece, LazyTensor):
                file.truncate(file.seek(piece.nbytes, io.SEEK_CUR))
                crcs.append(crc_of_zeros(piece.nbytes))
            else:
                file.write(piece(crcs) if callable(piece) else piece)


def crc_of_zeros(count: int) -> int:
    block, crc = bytes(min(count, 64 << 20)), 0
    for start in range(0, count, max(1, len(block))):
        crc = zlib.crc32(block[: count - start], crc)
    return crc


@pytest.mark.slow
def test_tensors_and_files_over_4_gb_are_read(tmp_path: Path) -> None:
    small = in_memory(np.arange(6, dtype=np.float32).reshape(2, 3), F32)
    large = LazyTensor(BY_NAME["uint8"], (1 << 16, (1 << 16) + 1), lambda start, stop: np.zeros(0))
    write_sparse(tmp_path / "x.pth", {"large": large, "small": small, "again": large})
    file = open_torch_file(tmp_path / "x.pth")
    assert file.tensor("small", file.content["small"]).read().tobytes() == bytes(24)  # holes here, too
    loaded = torch.load(tmp_path / "x.pth", weights_only=True, mmap=True)
    assert [tuple(tensor.shape) for tensor in loaded.values()] == [large.shape, small.shape, large.shape]
    with zipfile.ZipFile(tmp_path / "x.pth") as archive:
        assert archive.read("archive/version") == b"3\n"
        assert {info.file_size for info in archive.infolist() if info.file_size > 1 << 32} == {large.nbytes}
        last = archive.infolist()[-2]
        assert (last.header_offset > 1 << 32, last.CRC) == (True, crc_of_zeros(large.nbytes))


@pytest.mark.slow
def test_more_members_than_16_bits_count_are_read(tmp_path: Path) -> None:
    one = LazyTensor(BY_NAME["uint8"], (1,), lambda start, stop: np.zeros(1))
    write_sparse(tmp_path / "x.pth", {f"t{number}": one for number in range(70_000)})
    assert len(torch.load(tmp_path / "x.pth", weights_only=True, mmap=True)) == 70_000
    assert len(open_torch_file(tmp_path / "x.pth").content) == 70_000


# Other pickles


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.text() | st.binary(),
        lambda inner: st.tuples(inner, inner) | st.just(()) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=10,
    )
)
def test_python_reads_the_pickle(value: Any) -> None:
    data = b"".join(piece for piece in pickle_pieces(value, protocol=4) if isinstance(piece, bytes))
    assert pickle.loads(data) == value


def test_a_tensor_in_a_pickle_streams_as_its_bytes() -> None:
    tensor = in_memory(np.arange(6, dtype=np.float32).reshape(2, 3), F32)
    array = PickledCall(
        PickledName("numpy.core.multiarray", "_reconstruct"),
        (PickledName("numpy", "ndarray"), (0,), b"b"),
        (1, (2, 3), PickledCall(PickledName("numpy", "dtype"), ("f4", False, True)), False, tensor),
    )
    pieces = [
        piece if isinstance(piece, bytes) else as_data(piece) for piece in pickle_pieces({"w": array}, protocol=4)
    ]
    assert len(pieces) == 3
    assert np.array_equal(pickle.loads(b"".join(pieces))["w"], tensor.read())


def as_data(piece: LazyTensor | Callable[..., bytes]) -> bytes:
    assert isinstance(piece, LazyTensor)
    return piece.read().tobytes()
