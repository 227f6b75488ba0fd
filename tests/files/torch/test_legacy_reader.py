"""Torch files from before 1.6: files of torch's own old writer are read bit for bit, everything else is refused."""

from __future__ import annotations

import pickle
import random
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.files.torch_reader import TorchFile, is_torch_file, open_torch_file

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def save(path: Path, content: Any) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def values(file: TorchFile) -> dict[str, np.ndarray[Any, Any]]:
    return {name: file.tensor(name, ref).read() for name, ref in file.content.items()}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_element_type_is_read_to_the_bit(tmp_path: Path, kind: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(kind)
    read = values(open_torch_file(save(tmp_path / "x.bin", OrderedDict(a=tensor))))["a"]
    assert read.tobytes() == tensor.view(torch.uint8).numpy().tobytes() and read.shape == (3, 4)


def test_views_and_shared_storages_are_read(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    content = {"all": base, "rows": base[2:4], "turned": base.t(), "again": base, "one": torch.tensor(3.0)}
    read = values(open_torch_file(save(tmp_path / "x.bin", content)))
    assert all(np.array_equal(read[name], tensor.numpy()) for name, tensor in content.items())


def test_it_is_detected_by_content(tmp_path: Path) -> None:
    assert is_torch_file(save(tmp_path / "x", {"a": torch.ones(2)}))
    (tmp_path / "y.bin").write_bytes(pickle.dumps({"a": 1}, 2))
    assert not is_torch_file(tmp_path / "y.bin")


def test_a_tensor_is_known_before_it_is_read(tmp_path: Path) -> None:
    file = open_torch_file(save(tmp_path / "x.bin", {"a": torch.ones(2)}))
    tensor = file.tensor("a", file.content["a"])
    (tmp_path / "x.bin").unlink()
    with pytest.raises(FileNotFoundError):
        tensor.read()


@pytest.mark.slow
def test_every_truncation_is_a_refusal(tmp_path: Path) -> None:
    whole = save(tmp_path / "x.bin", {"a": torch.ones(3), "b": torch.zeros(2, 2)}).read_bytes()
    for size in range(16, len(whole)):
        (tmp_path / f"{size}.bin").write_bytes(whole[:size])
        with pytest.raises(InputRefused):
            open_torch_file(tmp_path / f"{size}.bin")


def test_changed_bytes_never_give_a_traceback(tmp_path: Path) -> None:
    whole = save(tmp_path / "x.bin", {"a": torch.ones(3), "b": torch.zeros(2, 2)}).read_bytes()
    dice = random.Random(0)
    for number in range(300):
        changed = bytearray(whole)
        changed[dice.randrange(16, len(whole))] = dice.randrange(256)
        (tmp_path / f"{number}.bin").write_bytes(changed)
        try:
            file = open_torch_file(tmp_path / f"{number}.bin")
            [file.tensor("x", ref).read() for ref in file.content.values() if hasattr(ref, "storage")]
        except (InputRefused, AttributeError) as problem:
            assert isinstance(problem, InputRefused) or not isinstance(file.content, dict)


class _Storage:
    """Stands for a storage in what `write` pickles."""

    def __init__(self, *reference: Any) -> None:
        self.reference = reference


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, _Storage) else None


class _Tensor:
    """Pickles as the call of `_rebuild_tensor_v2` on a `_Storage`."""

    def __init__(self, storage: _Storage, offset: int, shape: tuple[int, ...]) -> None:
        self.args: tuple[Any, ...] = (storage, offset, shape, (1,), False, OrderedDict())

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.args


def write(path: Path, content: Any, keys: Any, tail: bytes, system: Any = SYSTEM, protocol: int = PROTOCOL) -> Path:
    """A file as the old writer lays it out, with any value, list of keys and bytes after it."""
    with open(path, "wb") as file:
        for part in (MAGIC, protocol, system):
            pickle.dump(part, file, 2)
        _Pickler(file, 2).dump(content)
        pickle.dump(keys, file, 2)
        file.write(tail)
    return path


def floats(*numbers: float, count: int | None = None) -> bytes:
    return struct.pack(f"<q{len(numbers)}f", len(numbers) if count is None else count, *numbers)


def reference(key: str, count: int, view: Any = None, kind: Any = torch.FloatStorage) -> _Storage:
    return _Storage("storage", kind, key, "cpu", count, view)


def test_a_view_of_a_storage_lies_inside_it(tmp_path: Path) -> None:
    view = _Tensor(reference("7", 4, ("v", 1, 2)), 0, (2,))
    file = open_torch_file(write(tmp_path / "x.bin", {"a": view}, ["7"], floats(1, 2, 3, 4)))
    assert values(file)["a"].tolist() == [2, 3]


REFUSED: dict[str, tuple[Any, ...]] = {
    "another protocol": ({}, [], b"", SYSTEM, 1000),
    "big-endian": ({}, [], b"", {"little_endian": False}),
    "no system information": ({}, [], b"", None),
    "bytes after the last storage": ({}, [], b"more"),
    "keys that are not a list": ({}, 3, b""),
    "an unused key": ({}, ["1"], floats(1)),
    "a key twice": ({"a": _Tensor(reference("1", 1), 0, (1,))}, ["1", "1"], floats(1) * 2),
    "another number of elements": ({"a": _Tensor(reference("1", 2), 0, (2,))}, ["1"], floats(1, 2, count=3)),
    "a negative number of elements": ({"a": _Tensor(reference("1", 2), 0, (2,))}, ["1"], floats(1, 2, count=-2)),
    "a storage that is cut": ({"a": _Tensor(reference("1", 9), 0, (9,))}, ["1"], floats(1, 2, count=9)),
    "a view beyond its storage": ({"a": _Tensor(reference("1", 2, ("v", 1, 2)), 0, (2,))}, ["1"], floats(1, 2)),
    "a view of a missing storage": ({"a": _Tensor(reference("1", 2, ("v", 0, 1)), 0, (1,))}, [], b""),
    "two sizes of one storage": (
        {"a": _Tensor(reference("1", 1), 0, (1,)), "b": _Tensor(reference("1", 2), 0, (2,))},
        ["1"],
        floats(1, 2),
    ),
    "contradictory descriptions of a view": (
        {
            "a": _Tensor(reference("1", 4, ("v", 0, 2)), 0, (2,)),
            "b": _Tensor(reference("1", 4, ("v", 2, 2)), 0, (2,)),
        },
        ["1"],
        floats(1, 2, 3, 4),
    ),
    "a quantized storage": ({"a": _Tensor(reference("1", 1, kind=torch.QInt8Storage), 0, (1,))}, ["1"], floats(1)),
    "a persistent id that is not a storage": ({"a": _Storage("module", "x")}, [], b""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_inconsistent_file_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises((MalformedInput, UnsupportedInput)):
        open_torch_file(write(tmp_path / "x.bin", *REFUSED[case]))


def test_tensors_of_the_oldest_files_have_no_hooks(tmp_path: Path) -> None:
    class Oldest(_Tensor):
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor, self.args[:4]

    file = open_torch_file(write(tmp_path / "x.bin", {"a": Oldest(reference("1", 2), 0, (2,))}, ["1"], floats(3, 4)))
    assert values(file)["a"].tolist() == [3, 4]


def test_a_storage_without_data_is_refused_when_a_tensor_asks(tmp_path: Path) -> None:
    file = open_torch_file(write(tmp_path / "x.bin", {"a": _Tensor(reference("1", 1), 0, (1,))}, [], b""))
    with pytest.raises(MalformedInput, match="no data"):
        file.tensor("a", file.content["a"])


def test_a_call_that_runs_commands_is_refused_and_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    with pytest.raises(MalformedInput, match="nothing was run"):
        open_torch_file(write(tmp_path / "x.bin", {"a": Attack()}, [], b""))
    assert not (tmp_path / "ran").exists()
