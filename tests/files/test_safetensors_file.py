"""Invalid headers are refused; the safetensors library reads every accepted file, with the same bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.safetensors_file import ALIGNMENT, encode_header, read_header
from llmconv.tensors import BY_NAME

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]}


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header (JSON text or an object) in front of `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(7)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt"}
    assert {name: (t.dtype.name, t.shape) for name, t in header.tensors.items()} == {
        "a": ("float32", (2, 3)),
        "b": ("bfloat16", (3,)),
        "c": ("int64", ()),
    }
    assert np.array_equal(header.tensors["a"].rows(1, 2), [[3.0, 4.0, 5.0]])
    assert header.tensors["c"].read() == 7


OWN = getattr(safetensors.torch, "_TYPES", {}).keys() | {"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"}


@pytest.mark.parametrize("code", sorted(OWN))
def test_every_element_type_of_the_library_is_read_or_refused_by_name(code: str, tmp_path: Path) -> None:
    sizes = {"F4": 2, "F6_E2M3": 3, "F6_E3M2": 3, "C64": 32} | {one.code: 4 * one.itemsize for one in BY_NAME.values()}
    data = bytes(sizes.get(code, 4))
    path = write(tmp_path / "x", {"a": {"dtype": code, "shape": [4], "data_offsets": [0, len(data)]}}, data)
    safetensors.safe_open(path, "np")  # the library takes the header
    if code in {one.code for one in BY_NAME.values()}:
        assert read_header(path).tensors["a"].read().tobytes() == data
    else:
        with pytest.raises(UnsupportedInput, match=f"'a' of `x` is stored as `{code}`"):
            read_header(path)


def test_tensors_come_in_file_order(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"late": B, "early": A}, bytes(11))
    assert list(read_header(path).tensors) == ["early", "late"]


REFUSED: dict[str, tuple[Any, int]] = {
    "overlap": ({"a": A, "b": {**B, "data_offsets": [4, 7]}}, 8),
    "gap": ({"a": A, "b": {**B, "data_offsets": [9, 12]}}, 12),
    "same bytes twice": ({"a": A, "b": A}, 8),
    "past the end": ({"a": {**A, "data_offsets": [0, 8]}}, 4),
    "bytes left over": ({"a": A}, 9),
    "shape too large": ({"a": {**A, "shape": [3]}}, 8),
    "shape too small": ({"a": {**A, "shape": [1]}}, 8),
    "shape overflows": ({"a": {**A, "shape": [2**33, 2**33]}}, 8),
    "shape overflows to fit": ({"a": {**A, "shape": [2**62, 2**62]}}, 8),
    "negative size": ({"a": {**A, "shape": [-2]}}, 8),
    "size is a fraction": ({"a": {**A, "shape": [2.0]}}, 8),
    "size is true": ({"a": {**A, "dtype": "F64", "shape": [True]}}, 8),
    "offsets reversed": ({"a": {**A, "data_offsets": [8, 0]}}, 8),
    "negative offset": ({"a": {**A, "data_offsets": [-8, 0]}}, 0),
    "three offsets": ({"a": {**A, "data_offsets": [0, 8, 8]}}, 8),
    "unknown dtype": ({"a": {**A, "dtype": "F31"}}, 8),
    "field missing": ({"a": {"dtype": "F32", "shape": [2]}}, 8),
    "field too many": ({"a": {**A, "path": "/etc/passwd"}}, 8),
    "not an object": ([1, 2], 0),
    "not JSON": (b"{'a': 1}", 0),
    "name twice": (b'{"a": %b, "a": %b}' % ((json.dumps(A).encode(),) * 2), 8),
    "nested deeply": (b"[" * 100_000, 0),
    "metadata of numbers": ({"__metadata__": {"n": 1}, "a": A}, 8),
    "unprintable name": ({"a\x00b": A}, 8),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_inconsistent_header_is_refused(case: str, tmp_path: Path) -> None:
    header, size = REFUSED[case]
    with pytest.raises(MalformedInput, match="`x`"):
        read_header(write(tmp_path / "x", header, bytes(size)))


def test_a_tensor_that_a_save_left_empty_says_what_to_do(tmp_path: Path) -> None:
    """torchtitan's file of the head of a tied model, which its index lists."""
    with pytest.raises(MalformedInput, match="unknown dtype `` for tensor `lm_head") as caught:
        read_header(write(tmp_path / "x", {"lm_head.weight": {"dtype": "", "shape": [], "data_offsets": [0, 0]}}, b""))
    assert "delete its line in the index" in caught.value.hint


@pytest.mark.parametrize("length", [0, 1, 10**6, 10**9, 2**62, 2**64 - 1])
def test_a_wrong_header_length_is_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(MalformedInput):
        read_header(write(tmp_path / "x", {"a": A}, bytes(8), length=length))


@pytest.mark.parametrize("size", range(0, 80, 5))
def test_a_truncated_file_is_refused(size: int, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", {"a": A, "b": B}, bytes(11)).read_bytes()
    (tmp_path / "x").write_bytes(whole[: min(size, len(whole) - 1)])
    with pytest.raises(MalformedInput):
        read_header(tmp_path / "x")


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": A}, bytes(8))
    tensor = read_header(path).tensors["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(MalformedInput, match="4 bytes early"):
        tensor.read()


SIZES = st.one_of(st.integers(-2, 12), st.sampled_from([2**31, 2**62, 2**64]))
FIELD = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "F8_E4M3", "BOOL", "f32", ""]),
        "shape": st.lists(SIZES, max_size=3),
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2),
    }
)


def accepted_by_library(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        return safetensors.torch.load_file(path)
    except Exception:  # the library raises its own type, and others
        return None


@pytest.mark.slow
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=4), FIELD, max_size=3), size=st.integers(0, 24))
@example(header={"a": A, "b": B}, size=11)
@example(header={"a": {**A, "shape": [0], "data_offsets": [0, 0]}}, size=0)
def test_whatever_is_accepted_the_library_accepts(header: dict[str, Any], size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x", header, bytes(range(size)))
    try:
        ours = read_header(path).tensors
    except MalformedInput:
        return
    theirs = accepted_by_library(path)
    assert theirs is not None and theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert tensor.read().tobytes() == theirs[name].reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 150), value=st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_accepted_by_both(position: int, value: int, tmp_path: Path) -> None:
    content = bytearray(write(tmp_path / "x", {"a": A, "b": B}, bytes(11)).read_bytes())
    content[position % len(content)] = value
    (tmp_path / "x").write_bytes(content)
    try:
        read_header(tmp_path / "x")
    except MalformedInput:
        return
    assert accepted_by_library(tmp_path / "x") is not None


def test_an_encoded_header_is_aligned_and_read_by_the_library(tmp_path: Path) -> None:
    header = encode_header({"a": (BY_NAME["float32"], (2,)), "ä": (BY_NAME["uint8"], (3,))})
    assert len(header) % ALIGNMENT == 0
    (tmp_path / "x").write_bytes(header + bytes(11))
    with safetensors.safe_open(tmp_path / "x", framework="pt") as file:
        assert set(file.keys()) == {"a", "ä"}
        assert file.metadata() == {"format": "pt"}
