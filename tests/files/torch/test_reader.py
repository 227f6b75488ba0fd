"""Torch files: every view exactly, and every contradiction of a zip or a storage refused."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.torch_reader import is_torch_file, open_torch_blob, open_torch_file
from llmconv.tensors import LazyTensor

BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)

VIEWS = {
    "contiguous": BASE,
    "transposed": BASE.t(),
    "columns": BASE[:, 1:4],
    "rows": BASE[1:3],
    "every second row": BASE[::2],
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "one row of a column": BASE[:1, 2:3],
    "bfloat16": BASE.to(torch.bfloat16),
    "float16": BASE.to(torch.float16),
    "int64": BASE.to(torch.int64),
    "bool": BASE > 3,
    "uint8": BASE.to(torch.uint8),
    "parameter": torch.nn.Parameter(BASE),
}


def save(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def load(path: Path, name: str) -> LazyTensor:
    file = open_torch_file(path)
    return file.tensor(name, file.content[name])


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_reads_as_torch_reads_it(tmp_path: Path, name: str) -> None:
    tensor = load(save(tmp_path / "x.pt", {name: VIEWS[name]}), name)
    expected = VIEWS[name].detach().contiguous()
    assert (tensor.shape, tensor.dtype.name) == (tuple(expected.shape), str(expected.dtype).removeprefix("torch."))
    assert tensor.read().tobytes() == expected.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", [name for name, view in VIEWS.items() if view.ndim and len(view)])
def test_rows_read_one_by_one_make_the_whole(tmp_path: Path, name: str) -> None:
    tensor = load(save(tmp_path / "x.pt", {name: VIEWS[name]}), name)
    rows = np.concatenate([tensor.rows(start, start + 1) for start in range(tensor.num_rows)])
    assert rows.tobytes() == tensor.read().tobytes()


def test_tensors_that_share_a_storage_are_both_there(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"a": BASE, "b": BASE[2:]})
    assert open_torch_file(path).content["a"].storage.key == open_torch_file(path).content["b"].storage.key
    assert np.array_equal(load(path, "b").read(), BASE[2:].numpy())


def test_an_expanded_view_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"a": torch.zeros(1).expand(1 << 40)})
    with pytest.raises(MalformedInput, match="larger than its storage of 1 elements"):
        load(path, "a")


def test_a_complex_tensor_is_refused_by_its_storage(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"a": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(UnsupportedInput, match="`ComplexFloatStorage`"):
        load(path, "a")


def test_a_view_of_a_large_storage_reads_little_of_it(tmp_path: Path) -> None:
    columns = torch.arange(1 << 21, dtype=torch.int32).reshape(1 << 10, 1 << 11)
    for view in (columns.t(), columns[::200, ::500], columns[:, 7], columns.reshape(32, 32, -1).permute(2, 0, 1)):
        tensor = load(save(tmp_path / "x.pt", {"a": view}), "a")
        tracemalloc.start()
        rows = tensor.rows(3, 5)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # of 8 MB; other threads allocate, too
        tracemalloc.stop()
        assert rows.tobytes() == view[3:5].contiguous().numpy().tobytes()


class Storage:
    """Pickles as the persistent id of a float storage."""

    def __init__(self, numel: int) -> None:
        self.numel = numel


class View:
    """Pickles as the call that rebuilds a tensor."""

    def __init__(self, numel: int, offset: Any, shape: Any, stride: Any) -> None:
        self.args: tuple[Any, ...] = (Storage(numel), offset, shape, stride, False, OrderedDict())

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.args


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", value.numel) if isinstance(value, Storage) else None


def forge(path: Path, view: View, record: bytes = bytes(40)) -> Path:
    """A torch file with one storage of ten zeros (as `record`) and a tensor that says what `view` says."""
    stream = io.BytesIO()
    Pickler(stream, 2).dump({"a": view})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", stream.getvalue())
        archive.writestr("x/data/0", record)
    return path


def test_a_forged_but_honest_file_reads(tmp_path: Path) -> None:
    assert load(forge(tmp_path / "x.pt", View(10, 1, (3, 3), (3, 1))), "a").read().shape == (3, 3)


LIES = {
    "a storage with more elements": View(11, 0, (11,), (1,)),
    "a shape beyond the storage": View(10, 0, (11,), (1,)),
    "an offset beyond the storage": View(10, 8, (3,), (1,)),
    "a stride beyond the storage": View(10, 0, (2,), (10,)),
    "a negative offset": View(10, -1, (3,), (1,)),
    "a negative stride": View(10, 5, (3,), (-1,)),
    "a float as size": View(10, 0, (3.0,), (1,)),
    "a shape of another rank": View(10, 0, (3,), (1, 1)),
    "overlapping rows": View(10, 0, (8, 8), (0, 1)),
    "a size that overflows": View(10, 0, (1 << 63,), (1,)),
}


@pytest.mark.parametrize("view", LIES.values(), ids=LIES.keys())
def test_a_tensor_outside_its_storage_is_refused(tmp_path: Path, view: View) -> None:
    with pytest.raises(MalformedInput):
        load(forge(tmp_path / "x.pt", view), "a")


def test_a_record_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedInput, match="its record has 36 bytes"):
        load(forge(tmp_path / "x.pt", View(10, 0, (1,), (1,)), bytes(36)), "a")


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(forge(path, View(10, 0, (1,), (1,)))) as archive:
        content = archive.read("x/data.pkl")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", content)
    with pytest.raises(MalformedInput, match="no data for tensor `a`"):
        load(path, "a")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = save(tmp_path / "x.pt", {"a": BASE}).read_bytes()
    for length in range(0, len(data), 7):
        (tmp_path / "cut.pt").write_bytes(data[:length])
        with pytest.raises(MalformedInput):
            open_torch_file(tmp_path / "cut.pt")


def test_a_flipped_bit_in_the_pickle_is_refused(tmp_path: Path) -> None:
    data = bytearray(save(tmp_path / "x.pt", {"a": BASE}).read_bytes())
    data[data.index(b"FloatStorage")] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(MalformedInput, match="CRC"):
        open_torch_file(tmp_path / "x.pt")


def write_zip(path: Path, *members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


NONE = pickle.dumps(None, 2)


def test_a_compressed_member_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.pt", ("x/data.pkl", NONE), method=zipfile.ZIP_DEFLATED)
    with pytest.raises(MalformedInput, match="compressed or encrypted"):
        open_torch_file(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_duplicate_member_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.pt", ("x/data.pkl", NONE), ("x/data.pkl", NONE))
    with pytest.raises(MalformedInput, match="duplicate or misplaced"):
        open_torch_file(path)


def test_a_member_of_another_folder_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.pt", ("x/data.pkl", NONE), ("y/data/0", b""))
    with pytest.raises(MalformedInput, match="duplicate or misplaced"):
        open_torch_file(path)


def test_bytes_before_the_zip_are_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.pt", ("x/data.pkl", NONE))
    path.write_bytes(b"PK\x03\x04" + path.read_bytes())
    with pytest.raises(MalformedInput, match="bytes before it"):
        open_torch_file(path)


def test_two_names_for_one_member_are_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.pt", ("x/data.pkl", NONE), ("x/data/0", b"1234"))
    path.write_bytes(path.read_bytes().replace(b"x/data/0", b"x/data/1", 1))
    with pytest.raises(MalformedInput, match="contradictory headers"):
        open_torch_file(path)


def test_members_that_overlap_are_refused(tmp_path: Path) -> None:
    inner = write_zip(tmp_path / "inner.pt", ("x/data/1", b"1234")).read_bytes()
    path = write_zip(tmp_path / "x.pt", ("x/data.pkl", NONE), ("x/data/0", inner), ("x/data/1", b"1234"))
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"x/data/1") - 4
    data[entry : entry + 4] = data.index(inner).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(MalformedInput, match="overlaps"):
        open_torch_file(path)


def test_torchscript_is_refused_by_name(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.pt", ("x/data.pkl", NONE), ("x/code/__torch__.py", b"pass"))
    with pytest.raises(UnsupportedInput, match="TorchScript"):
        open_torch_file(path)


def test_tar_and_gzip_are_refused_by_name(tmp_path: Path) -> None:
    inner = save(tmp_path / "x.pt", {"a": BASE})
    with tarfile.open(tmp_path / "tar.pt", "w") as archive:
        archive.add(inner, "x.pt")
    (tmp_path / "gz.pt").write_bytes(gzip.compress(inner.read_bytes()))
    for name, what in (("tar.pt", "tar archive"), ("gz.pt", "gzip")):
        with pytest.raises(UnsupportedInput, match=what):
            open_torch_file(tmp_path / name)


def test_content_and_not_the_name_makes_a_torch_file(tmp_path: Path) -> None:
    assert is_torch_file(save(tmp_path / "weights.bin", {"a": BASE}))
    assert not is_torch_file(write_zip(tmp_path / "x.pt", ("x/readme", b"")))
    assert not is_torch_file(tmp_path)


def test_a_tensor_is_known_before_it_is_read(tmp_path: Path) -> None:
    file = open_torch_file(save(tmp_path / "x.pt", {"a": BASE}))
    assert isinstance(file.content["a"], TensorRef)
    tensor = file.tensor("a", file.content["a"])
    (tmp_path / "x.pt").unlink()
    assert tensor.nbytes == 96
    with pytest.raises(FileNotFoundError):
        tensor.read()


# A torch file inside of another file


@pytest.mark.parametrize("rows", [4, 4000], ids=["read at once", "read in parts"])
def test_a_torch_file_within_a_file_reads_as_torch_reads_it(tmp_path: Path, rows: int) -> None:
    value = torch.arange(rows * 6.0).reshape(rows, 6)
    data = save(tmp_path / "x.pt", value).read_bytes()
    (tmp_path / "many").write_bytes(b"front" + data + data)
    blob = open_torch_blob(tmp_path / "many", 5, len(data))
    tensor = blob.tensor("a", blob.content)
    assert np.array_equal(tensor.read(), value.numpy())
    assert np.array_equal(tensor.rows(1, 3), value[1:3].numpy())


@pytest.mark.parametrize(("start", "more"), [(4, 0), (6, 0), (5, -1), (5, 400), (5, 1 << 40), (-1, 0), (5, -10000)])
def test_a_range_that_is_not_a_torch_file_is_refused(tmp_path: Path, start: int, more: int) -> None:
    data = save(tmp_path / "x.pt", {"a": BASE}).read_bytes()
    (tmp_path / "many").write_bytes(b"front" + data + data)
    with pytest.raises(MalformedInput):
        open_torch_blob(tmp_path / "many", start, len(data) + more)
