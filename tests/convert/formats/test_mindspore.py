"""MindSpore files: genuine ones give their true values, hostile ones a refusal, ranks join as the strategy says."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from llmconv.convert.formats.mindformers.format import is_mindspore, open_parameters
from llmconv.convert.formats.mindformers.mindspore import ParallelLayout, is_mindspore_ckpt, read_ckpt, read_strategy
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput

Save = Callable[..., Path]
Encode = Callable[[int, Any], bytes]


@pytest.mark.parametrize("name", ["tiny.ckpt", "tiny_crc.ckpt", "tiny.safetensors", "full", "sh"])
def test_genuine_files_hold_their_true_values(mindspore: Path, name: str) -> None:
    assert is_mindspore(mindspore / name)
    found = open_parameters(mindspore / name).tensors
    with np.load(mindspore / "tiny.npz") as truth:
        assert set(found) == set(truth.files)
        for tensor in truth.files:
            value = found[tensor].read()
            assert value.dtype == truth[tensor].dtype and np.array_equal(value, truth[tensor])


ONES = {
    "one_b.ckpt": ("b", np.array([True, False, True])),
    "one_bf.ckpt": ("bf", np.array([[1.5, -2], [3, 0.1]]).astype(ml_dtypes.bfloat16)),
    "one_sc.ckpt": ("sc", np.array(3.5, np.float32)),
}


@pytest.mark.parametrize("name", ONES)
def test_other_types_and_a_scalar_are_read(mindspore: Path, name: str) -> None:
    tensor, value = ONES[name]
    found = read_ckpt(mindspore / name).tensors
    assert list(found) == [tensor] and found[tensor].shape == value.shape
    assert found[tensor].read().dtype == value.dtype and np.array_equal(found[tensor].read(), value)


def test_an_empty_file_is_nobodys(mindspore: Path) -> None:
    assert not is_mindspore_ckpt(mindspore / "one_e.ckpt")


def test_a_strategy_file_is_not_a_checkpoint(mindspore: Path) -> None:
    assert not is_mindspore_ckpt(mindspore / "src_strategy.ckpt")


def test_the_vocabulary_of_a_tokenizer_is_not_a_checkpoint() -> None:
    # it is a protobuf too, of messages that begin with a text
    assert not is_mindspore_ckpt(
        Path(__file__).parents[2] / "fixtures" / "composer" / "llama_full" / "hf_side_files" / "tokenizer.model"
    )


def test_an_encrypted_file_is_refused_by_name(mindspore: Path) -> None:
    assert is_mindspore_ckpt(mindspore / "tiny_cbc.ckpt")
    with pytest.raises(UnsupportedInput, match="is encrypted") as refusal:
        read_ckpt(mindspore / "tiny_cbc.ckpt")
    assert "dec_key" in refusal.value.hint


@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 1000])
def test_chunks_are_joined_even_inside_a_row(tmp_path: Path, save_ckpt: Save, chunk: int) -> None:
    values = np.arange(5 * 16, dtype=np.int32).reshape(5, 16)
    tensor = read_ckpt(save_ckpt(tmp_path / "x", {"a.weight": values}, chunk=chunk)).tensors["a.weight"]
    for start in range(5):
        for stop in range(start + 1, 6):
            assert np.array_equal(tensor.rows(start, stop), values[start:stop])


def test_a_chunk_that_is_missing_is_refused(tmp_path: Path, save_ckpt: Save) -> None:
    whole = save_ckpt(tmp_path / "x", {"a.weight": np.zeros((4, 4), np.float32)}, chunk=32).read_bytes()
    (tmp_path / "x").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MalformedInput, match="32 bytes in 1 parts for tensor `.*`, expected 64"):
        read_ckpt(tmp_path / "x")


def test_a_tensor_that_comes_again_later_is_refused(tmp_path: Path, save_ckpt: Save) -> None:
    one = save_ckpt(tmp_path / "x", {"a.weight": np.zeros(4), "b.weight": np.zeros(4)}).read_bytes()
    (tmp_path / "x").write_bytes(one + one)
    with pytest.raises(MalformedInput, match="duplicate tensor name `a.weight`"):
        read_ckpt(tmp_path / "x")


def test_a_wrong_checksum_is_refused(mindspore: Path, tmp_path: Path) -> None:
    content = bytearray((mindspore / "tiny_crc.ckpt").read_bytes())
    content[200] ^= 1
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(MalformedInput, match="invalid checksum"):
        read_ckpt(tmp_path / "x.ckpt")


def test_the_checksum_of_a_large_file_is_left_with_a_warning(
    tmp_path: Path, save_ckpt: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_ckpt(tmp_path / "x", {"a.weight": np.zeros(1000)})
    path.write_bytes(path.read_bytes() + b"crc_num" + zlib.crc32(path.read_bytes()).to_bytes(10, "big"))
    assert read_ckpt(path).warnings == ()
    monkeypatch.setattr("llmconv.convert.formats.mindformers.mindspore.CRC_LIMIT", 100)
    assert "was not verified" in read_ckpt(path).warnings[0]


def test_scalars_of_older_writers_and_packed_dims_are_read(tmp_path: Path, encode_field: Encode) -> None:
    def value(tag: bytes, dims: bytes, content: bytes) -> bytes:
        tensor = dims + encode_field(2, b"Float32") + encode_field(3, content)
        return encode_field(1, encode_field(1, tag) + encode_field(2, tensor))

    old = value(b"old", encode_field(1, 0), np.float32(3).tobytes())
    packed = value(b"packed", encode_field(1, b"\x02\x03"), np.arange(6, dtype=np.float32).tobytes())
    (tmp_path / "x").write_bytes(old + packed)
    found = read_ckpt(tmp_path / "x").tensors
    assert found["old"].shape == () and float(found["old"].read()) == 3
    assert found["packed"].shape == (2, 3)


def test_texts_are_passed_over(tmp_path: Path, encode_field: Encode, save_ckpt: Save) -> None:
    text = encode_field(1, 0) + encode_field(2, b"str") + encode_field(3, "step".encode("utf-32-le"))
    path = save_ckpt(tmp_path / "x", {"a.weight": np.zeros(3)})
    path.write_bytes(path.read_bytes() + encode_field(1, encode_field(1, b"note") + encode_field(2, text)))
    assert list(read_ckpt(path).tensors) == ["a.weight"]


HOSTILE = {
    "a field longer than the file": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x0a\x01a",
    "a number without end": b"\x0a\x04\x0a\x01a\x12" + b"\xff" * 12,
    "a group": b"\x0a\x04\x0a\x01a\x13",
    "a name that is no text": b"\x0a\x05\x0a\x01\xff\x12\x00",
    "a name of control characters": b"\x0a\x05\x0a\x01\x1b\x12\x00",
    "no name": b"\x0a\x02\x12\x00",
    "no content": b"\x0a\x07\x0a\x01a\x12\x02\x08\x02",
    "too many axes": b"\x0a\x2b\x0a\x01a\x12\x26" + b"\x08\x01" * 17 + b"\x12\x00\x1a\x00",
    "a list that is too long": b"\x0a\xef\x05\x0a\x01a\x12\xe9\x05\x0a\xe6\x05" + b"\x01" * 742,
    "another field": b"\x12\x02\x0a\x00",
    "an overlong name": b"\x0a\x88\x10\x0a\x81\x10" + b"a" * 2049 + b"\x12\x00\x00\x00",
    "a negative size": b"\x0a\x1a\x0a\x01a\x12\x15\x08" + b"\xff" * 9 + b"\x01\x12\x05Int64\x1a\x01\x00",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_messages_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(MalformedInput):
        read_ckpt(tmp_path / "x.ckpt")


def test_a_hash_map_and_packed_integers_are_refused(tmp_path: Path, encode_field: Encode) -> None:
    def refused(tensor: bytes) -> str:
        (tmp_path / "x").write_bytes(encode_field(1, encode_field(1, b"a") + tensor))
        with pytest.raises(UnsupportedInput) as refusal:
            read_ckpt(tmp_path / "x")
        return refusal.value.message

    assert "hash map" in refused(encode_field(3, b""))
    int4 = encode_field(1, 2) + encode_field(2, b"Int4") + encode_field(3, b"\x00")
    assert "type `Int4`" in refused(encode_field(2, int4))


@pytest.mark.parametrize("length", [1, 40, 500, 5000, 13272])
def test_a_truncated_file_is_refused(mindspore: Path, tmp_path: Path, length: int) -> None:
    (tmp_path / "x.ckpt").write_bytes((mindspore / "tiny.ckpt").read_bytes()[:length])
    with pytest.raises(MalformedInput):
        read_ckpt(tmp_path / "x.ckpt")


@pytest.mark.slow
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_refused_or_read_within_the_file(
    mindspore: Path, tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray((mindspore / "tiny.ckpt").read_bytes()[:1500])
    for position, value in changes:
        content[position] = value
    (tmp_path / "x").write_bytes(content)
    try:
        found = read_ckpt(tmp_path / "x").tensors
    except LlmconvError:
        return
    assert sum(tensor.read().nbytes for tensor in found.values()) <= len(content)


# Folders


def test_ranks_without_a_strategy_are_refused(mindspore: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(mindspore / "sh", tmp_path / "run" / "checkpoint")
    with pytest.raises(UnsupportedInput, match="no strategy file") as refusal:
        open_parameters(folder)
    assert "--strategy" in refusal.value.hint


def test_a_missing_rank_is_refused(mindspore: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(mindspore / "sh", tmp_path / "checkpoint")
    shutil.copytree(folder / "rank_1", folder / "rank_3")
    with pytest.raises(MalformedInput, match="`rank_2` is missing"):
        open_parameters(folder)


def test_ranks_that_the_strategy_does_not_know_are_refused(mindspore: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(mindspore / "sh", tmp_path / "run" / "checkpoint")
    shutil.copytree(folder / "rank_1", folder / "rank_2")
    shutil.copytree(mindspore, tmp_path / "run" / "strategy", ignore=lambda _, names: {*names} - {"src_strategy.ckpt"})
    with pytest.raises(MalformedInput, match="has 3 ranks, but the strategy `.*strategy` divides"):
        open_parameters(folder)


def test_a_damaged_strategy_is_refused(mindspore: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(mindspore / "sh", tmp_path / "checkpoint")
    (folder / "ckpt_strategy_rank_0.ckpt").write_bytes((mindspore / "src_strategy.ckpt").read_bytes()[:700])
    with pytest.raises(MalformedInput, match="is not a strategy file"):
        open_parameters(folder)


def test_a_folder_of_several_checkpoints_asks_for_one(tmp_path: Path, save_ckpt: Save) -> None:
    for step in (1, 2):
        save_ckpt(tmp_path / f"llama-{step}.ckpt", {"a.weight": np.zeros(2)})
    with pytest.raises(InputRefused, match="holds 2 checkpoints") as refusal:
        open_parameters(tmp_path)
    assert "llama-2.ckpt" in refusal.value.hint


def test_the_optimizer_and_the_counters_are_left_out(tmp_path: Path, save_ckpt: Save) -> None:
    names = ["a.weight", "adam_m.a.weight", "accu_grads.a.weight", "epoch_num", "model.layers.0.attention.key_cache"]
    found = open_parameters(save_ckpt(tmp_path / "x.ckpt", {name: np.zeros(2) for name in names}))
    assert list(found.tensors) == ["a.weight"]
    assert found.warnings == ("left out 4 tensors of the optimizer and the run",)


LAYOUTS = {
    "rows": ((4,), ((0,), ())),
    "columns": ((2, 2), ((), (0,))),
    "both": ((2, 2), ((1,), (0,))),
    "neither, on all": ((4,), ((), ())),
    "one axis by two dimensions": ((2, 2), ((0, 1), ())),
}


@pytest.mark.parametrize(("devices", "axes"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_parts_come_back_to_their_places(
    tmp_path: Path, save_ckpt: Save, encode_field: Encode, devices: Any, axes: Any
) -> None:
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    layout = ParallelLayout(devices, axes)
    for rank in range(4):
        part = whole
        for axis, (place, count) in enumerate(zip(layout.coordinates_of(rank), layout.parts(), strict=True)):
            part = np.split(part, count, axis)[place]
        (tmp_path / "c" / f"rank_{rank}").mkdir(parents=True)
        save_ckpt(tmp_path / "c" / f"rank_{rank}" / "x.ckpt", {"a.weight": part, "adam_m.a.weight": part})
    write_strategy(tmp_path / "c" / "ckpt_strategy_rank_0.ckpt", encode_field, devices, axes)
    assert np.array_equal(open_parameters(tmp_path / "c").tensors["a.weight"].read(), whole)


def write_strategy(
    path: Path, field: Encode, devices: Any, axes: Any, step: int = 0, size: int = 0, name: bytes = b"a.weight"
) -> None:
    def dims(values: Any) -> bytes:
        return b"".join(field(1, value) for value in values)

    maps = [axis or (-1,) for axis in axes]
    nested = any(len(axis) > 1 for axis in maps)
    tensor_map = [field(2, dims(axis)) for axis in maps] if nested else [field(2, dims([axis[0] for axis in maps]))]
    layouts = field(1, dims(devices)) + b"".join(tensor_map) + field(3, b"") + field(4, b"")
    layouts += field(5, 0) + field(6, step) + field(7, size)
    path.write_bytes(field(1, 1) + field(3, field(1, name) + field(2, layouts)))


def test_tensors_that_the_optimizer_divides_further_are_joined(
    tmp_path: Path, save_ckpt: Save, encode_field: Encode
) -> None:
    # upstream's own rule (_construct_tensor_layout_for_opt_shard): the model divides first, then the optimizer
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    for rank in range(4):
        first = rank % 2 * 4 + rank // 2 * 2
        (tmp_path / "c" / f"rank_{rank}").mkdir(parents=True)
        save_ckpt(tmp_path / "c" / f"rank_{rank}" / "x.ckpt", {"a.weight": whole[first : first + 2]})
    write_strategy(tmp_path / "c" / "s_strategy.ckpt", encode_field, (2, 2), ((0,), ()), step=2, size=2)
    assert np.array_equal(open_parameters(tmp_path / "c").tensors["a.weight"].read(), whole)


def test_the_stages_of_a_pipeline_are_put_together(tmp_path: Path, save_ckpt: Save, encode_field: Encode) -> None:
    whole = np.arange(16, dtype=np.float32).reshape(4, 4)
    (tmp_path / "strategy").mkdir()
    for rank, name in enumerate(["a.weight", "a.weight", "b.weight", "b.weight"]):
        (tmp_path / "c" / f"rank_{rank}").mkdir(parents=True)
        save_ckpt(tmp_path / "c" / f"rank_{rank}" / "x.ckpt", {name: np.split(whole, 2)[rank % 2]})
        place = tmp_path / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt"
        write_strategy(place, encode_field, (2,), ((0,), ()), name=f"{rank // 2}-{name}".encode())
    found = open_parameters(tmp_path / "c").tensors
    assert np.array_equal(found["a.weight"].read(), whole) and np.array_equal(found["b.weight"].read(), whole)


@pytest.mark.parametrize(("devices", "axes"), [((2,), ((3,), ())), ((0,), ((0,), ())), ((1 << 40,), ((0,), ()))])
def test_an_impossible_layout_is_refused(tmp_path: Path, encode_field: Encode, devices: Any, axes: Any) -> None:
    write_strategy(tmp_path / "s_strategy.ckpt", encode_field, devices, axes)
    with pytest.raises(MalformedInput, match="invalid layouts"):
        read_strategy(tmp_path / "s_strategy.ckpt")


def test_a_strategy_in_json_is_read(tmp_path: Path) -> None:
    item = '{"dev_matrix": [2, 2], "tensor_map": [0, -1], "param_split_shape": [], "indices_offset": []}'
    (tmp_path / "strategy.json").write_text(f'{{"parallel_layout_item": {{"a.weight": {item}}}}}')
    assert read_strategy(tmp_path / "strategy.json") == {"a.weight": ParallelLayout((2, 2), ((0,), ()))}


def test_ranks_that_keep_one_copy_of_each_part_are_joined(
    tmp_path: Path, save_ckpt: Save, encode_field: Encode
) -> None:
    # `remove_redundancy=True`: of the four ranks, 1 and 2 hold nothing of this tensor
    whole = np.arange(16, dtype=np.float32).reshape(4, 4)
    for rank in range(4):
        (tmp_path / "c" / f"rank_{rank}").mkdir(parents=True)
        held = {0: {"a.weight": whole[:2]}, 3: {"a.weight": whole[2:]}}.get(rank, {"b.weight": whole})
        save_ckpt(tmp_path / "c" / f"rank_{rank}" / "x.ckpt", held)
    for name, axes in (("a", ((0,), ())), ("b", ((), ()))):
        place = tmp_path / "c" / f"{name}_strategy.ckpt"
        write_strategy(place, encode_field, (2, 2), axes, name=f"{name}.weight".encode())
    found = open_parameters(tmp_path / "c").tensors
    assert np.array_equal(found["a.weight"].read(), whole) and np.array_equal(found["b.weight"].read(), whole)


def test_a_part_that_no_rank_holds_is_refused(tmp_path: Path, save_ckpt: Save, encode_field: Encode) -> None:
    for rank, name in enumerate(["a.weight", "b.weight"]):
        (tmp_path / "c" / f"rank_{rank}").mkdir(parents=True)
        save_ckpt(tmp_path / "c" / f"rank_{rank}" / "x.ckpt", {name: np.zeros((2, 4))})
        place = tmp_path / "c" / f"strategy_{rank}.ckpt"
        write_strategy(place, encode_field, (2,), ((0,), ()), name=name.encode())
    with pytest.raises(MalformedInput, match="holds 1 of 2 parts"):
        open_parameters(tmp_path / "c")


@pytest.mark.slow
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 1491), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_of_a_strategy_are_refused_or_give_whole_tensors(
    mindspore: Path, tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray((mindspore / "src_strategy.ckpt").read_bytes())
    for position, value in changes:
        content[position] = value
    folder = shutil.copytree(mindspore / "sh", tmp_path / "run" / "checkpoint", dirs_exist_ok=True)
    (tmp_path / "run" / "src_strategy.ckpt").write_bytes(content)
    try:
        found = open_parameters(folder).tensors
    except LlmconvError:
        return
    assert all(tensor.read().shape == tensor.shape for tensor in found.values())
