"""Distributed checkpoints: every grid exactly, nothing read but what is asked for, every lie refused in one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint import _version, metadata
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo

from llmconv.convert.state_dicts.distributed import (
    BlobLocation,
    BytesItem,
    Chunk,
    DistributedFolder,
    assemble,
    is_tiled,
    open_folder,
)
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.files import safetensors_file
from llmconv.tensors import BY_NAME, LazyTensor, in_memory
from tests.builders.dcp_folders import change, save, split

GRIDS = json.loads((Path(__file__).parents[2] / "fixtures" / "dcp" / "grids.json").read_text())


def tensor(folder: DistributedFolder, *keys: str) -> LazyTensor:
    item: Any = folder.tree
    for key in keys:
        item = item[key]
    return folder.tensor(keys[-1], item)


@pytest.mark.parametrize("name", GRIDS)
def test_a_tensor_sharded_by_torch_comes_back_bit_for_bit(dcp: Path, name: str) -> None:
    found = tensor(open_folder(dcp / "grids"), "model", name)
    assert [found.dtype.name, list(found.shape)] == GRIDS[name]
    with np.load(dcp / "grids.npz") as expected:
        assert found.read().tobytes() == expected[name].tobytes()


@pytest.mark.parametrize("name", [name for name in GRIDS if name not in ("scalar", "empty")])
def test_rows_read_one_by_one_make_the_whole(dcp: Path, name: str) -> None:
    found = tensor(open_folder(dcp / "grids"), "model", name)
    rows = np.concatenate([found.rows(start, start + 1) for start in range(found.num_rows)])
    assert rows.tobytes() == found.read().tobytes()


def test_values_keep_their_nesting_whatever_dots_are_in_their_names(dcp: Path) -> None:
    folder = open_folder(dcp / "grids")
    assert folder.values(folder.tree["extra"]) == {
        "lr": 0.5,
        "name": "a.b",
        "list": [{}, {"x": 1}, {"y.z": (1, 2)}],
        "dict.with.dots": {"a": {"b": None}},
        "words": ["a", "b"],
    }


def test_dicts_that_old_torch_stored_whole_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    state = {"model": {"w": torch.ones(2)}, "extra": {"vocab": {"a": 0, "b.c": 1}, "list": [["x"], 1]}}
    folder = open_folder(save(tmp_path / "x", state))
    assert isinstance(folder.tree["extra"], BytesItem)
    assert folder.values(folder.tree["extra"]) == state["extra"]


def test_the_classes_of_old_torch_are_understood(tmp_path: Path) -> None:
    def age(content: Any) -> None:
        content.state_dict_metadata["w"].properties = OldProperties(dtype=torch.bfloat16)
        del content.storage_meta, content.version

    folder = open_folder(change(save(tmp_path / "x", {"w": torch.ones(2, 3, dtype=torch.bfloat16)}), age))
    assert (tensor(folder, "w").read() == 1).all()


def test_a_state_dict_that_was_not_flattened_has_its_names_for_places(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"a.b": torch.ones(2)})
    folder = open_folder(change(path, lambda content: setattr(content, "planner_data", None)))
    assert tensor(folder, "a.b").read().tolist() == [1, 1]


@pytest.mark.parametrize("options", [{"single_file_per_rank": False}, {"thread_count": 3}])
def test_items_spread_over_many_files_are_found(tmp_path: Path, options: dict[str, Any]) -> None:
    state = {f"w{number}": torch.full((2, 2), float(number)) for number in range(5)}
    folder = open_folder(save(tmp_path / "x", state, **options))
    assert folder.shards >= 3
    assert [float(tensor(folder, name).read()[0, 0]) for name in state] == [0, 1, 2, 3, 4]


def test_a_tensor_is_known_before_any_shard_is_opened(dcp: Path, tmp_path: Path) -> None:
    shutil.copytree(dcp / "grids", tmp_path / "x")
    for shard in (tmp_path / "x").glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    assert tensor(open_folder(tmp_path / "x"), "model", "grid").shape == (5, 6)


def test_rows_are_read_from_the_chunks_that_hold_them(dcp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tensor(open_folder(dcp / "grids"), "model", "rows.uneven")
    spans: list[tuple[str, int]] = []
    monkeypatch.setattr(safetensors_file, "read_into", lambda path, buffer, _: spans.append((path.name, len(buffer))))
    found.rows(1, 3)
    assert spans == [("__0_0.distcp", 20), ("__1_0.distcp", 20)]


def test_thirty_gigabytes_are_opened_at_once_and_read_where_asked(tmp_path: Path) -> None:
    rows, path = 2_000_000, save(tmp_path / "x", {"w": torch.zeros(1, 2048)})
    for number in range(2):
        with FakeTensorMode():
            part = torch.empty(rows, 2048)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(part, path / f"{number}__0_0.distcp")

    def enlarge(content: Any) -> None:
        content.state_dict_metadata["w"].size = torch.Size([2 * rows, 2048])
        split(content, "w", [((0, 0), (rows, 2048)), ((rows, 0), (rows, 2048))])
        for place in content.storage_data.values():
            place.length = (path / place.relative_path).stat().st_size

    found = tensor(open_folder(change(path, enlarge)), "w")
    assert found.nbytes > 32e9
    assert found.rows(rows - 2, rows + 2).tobytes() == bytes(4 * 2048 * 4)


# Any tiling


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Chunk]]:
    """A shape, and boxes that tile it: cut again and again, along any dim, at any place (also into empty ones)."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 7))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        for low, high in ((0, cut), (cut, sizes[dim])):
            start = (*offsets[:dim], offsets[dim] + low, *offsets[dim + 1 :])
            boxes.append((start, (*sizes[:dim], high - low, *sizes[dim + 1 :])))
    return shape, [Chunk(offsets, sizes, BlobLocation("x", 0, 0)) for offsets, sizes in draw(st.permutations(boxes))]


def cut_out(whole: Any, chunk: Chunk) -> Any:
    return whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(tilings(), st.data())
def test_any_tiling_reassembles_exactly(tiling: tuple[tuple[int, ...], list[Chunk]], data: st.DataObject) -> None:
    shape, chunks = tiling
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    dtype = BY_NAME["float32"]
    joined = assemble(dtype, shape, chunks, lambda chunk: in_memory(cut_out(whole, chunk), dtype))
    start = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(start, shape[0]))
    assert is_tiled(shape, chunks)
    assert np.array_equal(joined.rows(start, stop), whole[start:stop])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(tilings(), st.data())
def test_boxes_that_do_not_cover_each_element_once_are_no_tiling(
    tiling: tuple[tuple[int, ...], list[Chunk]], data: st.DataObject
) -> None:
    shape, chunks = tiling
    number = data.draw(st.integers(0, len(chunks) - 1))
    dim = data.draw(st.integers(0, len(shape) - 1))
    chunk = chunks[number]
    offsets = (*chunk.offsets[:dim], chunk.offsets[dim] + data.draw(st.integers(0, 3)), *chunk.offsets[dim + 1 :])
    moved = [*chunks[:number], chunk._replace(offsets=offsets), *chunks[number + 1 :]]
    counts = np.zeros([size + 9 for size in shape], dtype=int)
    for box in moved:
        cut_out(counts, box)[...] += 1
    inside = counts[tuple(slice(size) for size in shape)]
    assert is_tiled(shape, moved) == (bool((inside == 1).all()) and counts.sum() == inside.sum())


# What is refused


class Command:
    """Pickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def refusal(path: Path, *keys: str) -> InputRefused:
    """The error of reading the tensor, which is one line with a hint."""
    with pytest.raises(InputRefused) as caught:
        tensor(open_folder(path), *keys).read()
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def small(tmp_path: Path, **more: Any) -> Path:
    return save(tmp_path / "x", {"w": torch.arange(16.0).reshape(4, 4), "v": torch.ones(3), **more})


def places(content: Any) -> list[_StorageInfo]:
    return list(content.storage_data.values())


Edit = Callable[[Any], Any]
HALF = (2, 4)
LIES: dict[str, tuple[Edit, str]] = {
    "chunks that overlap": (lambda m: split(m, "w", [((0, 0), (3, 4)), ((1, 0), (3, 4))]), "overlap, leave a gap"),
    "equal chunks": (lambda m: split(m, "w", [((0, 0), HALF), ((0, 0), HALF)]), "overlap, leave a gap"),
    "a gap": (lambda m: split(m, "w", [((0, 0), HALF), ((3, 0), (1, 4))]), "overlap, leave a gap"),
    "no chunk": (lambda m: split(m, "w", []), "overlap, leave a gap"),
    "a chunk outside": (lambda m: split(m, "w", [((0, 0), HALF), ((3, 0), HALF)]), "overlap, leave a gap"),
    "a negative offset": (lambda m: split(m, "w", [((-1, 0), (4, 4))]), "invalid index"),
    "a chunk of another rank": (lambda m: split(m, "w", [((0,), (16,))]), "with an invalid shape"),
    "a huge shape": (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([1 << 62, 4])), "invalid shape"),
    "another shape": (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([8, 4])), "leave a gap"),
    "another dtype": (
        lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.int32),
        r"expected \[4, 4\] int32, got \[4, 4\] float32 in `__0_0.distcp`",
    ),
    "a path up": (lambda m: setattr(places(m)[0], "relative_path", "../x"), "outside the folder"),
    "an absolute path": (lambda m: setattr(places(m)[0], "relative_path", "/etc/passwd"), "outside the folder"),
    "a path of Windows": (lambda m: setattr(places(m)[0], "relative_path", "a\\b"), "outside the folder"),
    "a path with a newline": (lambda m: setattr(places(m)[0], "relative_path", "a\nb"), "outside the folder"),
    "a file that is not there": (lambda m: setattr(places(m)[0], "relative_path", "y"), "`y` is missing"),
    "a position beyond the file": (lambda m: setattr(places(m)[0], "offset", 1 << 40), "ends at byte"),
    "a length beyond the item": (lambda m: setattr(places(m)[0], "length", 4000), "items that overlap"),
    "a length too short": (lambda m: setattr(places(m)[0], "length", 700), "truncated or damaged"),
    "a negative position": (lambda m: setattr(places(m)[0], "offset", -1), "invalid bytes"),
    "a position inside": (lambda m: setattr(places(m)[0], "offset", 64), "overlap"),
    "a position that is no number": (lambda m: setattr(places(m)[0], "offset", "0"), "invalid bytes"),
    "an item nowhere": (lambda m: m.storage_data.popitem() and m.storage_data.clear(), "no storage location"),
    "no storage": (lambda m: setattr(m, "storage_data", None), "without `storage_data`"),
    "no items": (lambda m: setattr(m, "state_dict_metadata", [1]), "lists no items"),
    "another class": (lambda m: m.state_dict_metadata, "invalid `Metadata`"),
    "a place inside an item": (lambda m: m.planner_data.update(v=("w", "v")), "nested in the item"),
    "two items in one place": (lambda m: m.planner_data.update(v=("w",)), "duplicate key"),
    "a place that is none": (lambda m: m.planner_data.update(v=()), "no valid key in the nested dict"),
    "a key that is none": (lambda m: m.planner_data.update(v=(1.5,)), "invalid key for item"),
    "a place too deep": (lambda m: m.planner_data.update(v=("a",) * 100), "no valid key in the nested dict"),
    "a name that is none": (lambda m: m.state_dict_metadata.update({7: None}), "no valid key in the nested dict"),
    "an item that is none": (lambda m: m.state_dict_metadata.update(v=None), "invalid `TensorStorageMetadata`"),
    "a command": (lambda m: m.planner_data.update(v=Command("touch canary")), "nothing was run"),
}


@pytest.mark.parametrize(("edit", "reason"), LIES.values(), ids=LIES.keys())
def test_metadata_that_are_wrong_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit, reason: str
) -> None:
    path = change(small(tmp_path), edit)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputRefused, match=reason):
        raise refusal(path, "w")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_blob_inside_a_blob_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"w": torch.ones(1, dtype=torch.uint8)})
    inner = (path / "__0_0.distcp").read_bytes()
    outer = save(tmp_path / "y", {"w": torch.frombuffer(bytearray(inner), dtype=torch.uint8), "v": torch.ones(1)})
    data = (outer / "__0_0.distcp").read_bytes()

    def nest(content: Any) -> None:
        content.storage_data[metadata.MetadataIndex("v", torch.Size([0]))] = _StorageInfo(
            "__0_0.distcp", data.index(inner), len(inner)
        )

    assert "overlap" in refusal(change(outer, nest), "v").message


def test_a_blob_that_runs_a_command_is_refused_and_does_not_run_it(tmp_path: Path) -> None:
    folder = open_folder(small(tmp_path, extra={"a": Command(f"touch {tmp_path / 'canary'}")}))
    with pytest.raises(MalformedInput, match="nothing was run"):
        folder.values(folder.tree["extra"])
    assert not (tmp_path / "canary").exists()


def test_a_value_in_place_of_a_tensor_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path, extra=[1, 2])

    def swap(content: Any) -> None:
        value = content.storage_data.pop(metadata.MetadataIndex("extra"))
        index = metadata.MetadataIndex("w", torch.Size([0, 0]))
        content.storage_data[metadata.MetadataIndex("extra")] = content.storage_data[index]
        content.storage_data[index] = value

    assert "has no tensor" in refusal(change(path, swap), "w").message


@pytest.mark.slow
def test_every_truncation_of_the_metadata_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path)
    data = (path / ".metadata").read_bytes()
    for length in range(0, len(data), 11):
        (path / ".metadata").write_bytes(data[:length])
        with pytest.raises(MalformedInput):
            open_folder(path)


@pytest.mark.slow
def test_bytes_changed_anywhere_in_the_metadata_never_escape_as_another_error(tmp_path: Path) -> None:
    path, noise = small(tmp_path), np.random.default_rng(0)
    data = (path / ".metadata").read_bytes()
    for position in range(0, len(data), 3):
        changed = bytearray(data)
        changed[position] = noise.integers(256)
        (path / ".metadata").write_bytes(changed)
        try:
            tensor(open_folder(path), "w").read()
        except (InputRefused, KeyError) as error:
            assert isinstance(error, InputRefused) or error.args == ("w",)


def test_a_truncated_shard_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = small(tmp_path)
    data = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(data[:-10])
    assert "copy the folder again" in refusal(path, "v").hint


def test_a_missing_metadata_file_is_explained(tmp_path: Path) -> None:
    path = small(tmp_path)
    (path / ".metadata").unlink()
    assert "`cp *` leaves it out" in refusal(path, "w").hint


def test_metadata_of_each_rank_alone_are_refused_by_name(tmp_path: Path) -> None:
    path = small(tmp_path)
    (path / ".metadata").rename(path / "__0.metadata")
    assert "use_collectives" in refusal(path, "w").message


def test_torchs_safetensors_variant_is_refused_by_name(tmp_path: Path) -> None:
    path = save(
        tmp_path / "x", {"w": torch.ones(2), "v": torch.ones(3)}, serialization_format=SerializationFormat.SAFETENSORS
    )
    assert "SerializationFormat.SAFETENSORS" in refusal(path, "w").message


def test_compressed_blobs_are_refused_by_the_name_of_the_extension(tmp_path: Path) -> None:
    path = change(small(tmp_path), lambda m: setattr(places(m)[0], "transform_descriptors", ["stream.zstd/1"]))
    assert "`stream.zstd/1`" in refusal(path, "w").message


def test_an_element_type_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"w": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(UnsupportedInput, match="`complex64`"):
        raise refusal(path, "w")


def test_a_list_with_a_far_element_is_refused(tmp_path: Path) -> None:
    path = change(small(tmp_path, extra=1), lambda m: m.planner_data.update(extra=("extra", 1 << 40)))
    folder = open_folder(path)
    with pytest.raises(MalformedInput, match="has a list with an element"):
        folder.values(folder.tree["extra"])


def test_the_metadata_of_megatrons_subclass_is_read(tmp_path: Path) -> None:
    path = small(tmp_path)
    data = pickle.dumps(pickle.loads((path / ".metadata").read_bytes()), 2)
    old = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    assert old in data
    own = b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    (path / ".metadata").write_bytes(data.replace(old, own))
    assert tensor(open_folder(path), "w").read().tolist() == torch.arange(16.0).reshape(4, 4).tolist()


def test_a_chunk_of_several_stacked_tensors_is_refused(tmp_path: Path) -> None:
    folder = open_folder(small(tmp_path))
    item = folder.tree["v"]
    with pytest.raises(MalformedInput, match="span several"):
        folder.elements("v", item, 1)
