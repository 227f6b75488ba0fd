"""`.pdparams` pickles: every protocol reads as numpy reads it, nothing runs, and what is damaged is refused."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from llmconv.convert.formats.paddle.read import is_pdparams, open_pdparams
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle"

ARRAYS = hnp.arrays(
    st.sampled_from(["<f4", "<f2", "<f8", "<i8", "<i4", "i1", "u1", "?"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
)


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.call


def write(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), ARRAYS, min_size=1, max_size=4), st.sampled_from([2, 3, 4, 5]))
def test_arrays_of_any_protocol_read_as_numpy_has_them(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, Any], protocol: int
) -> None:
    path = write(tmp_path_factory.mktemp("x") / "x", arrays, protocol)
    assert is_pdparams(path)
    tensors = open_pdparams(path)
    assert {name: (tensor.shape, tensor.read().tobytes()) for name, tensor in tensors.items()} == {
        name: (array.shape, array.tobytes()) for name, array in arrays.items()
    }


def test_genuine_files_hold_three_float_types() -> None:
    tensors = open_pdparams(FIXTURES / "tiny_262.pdparams")
    assert {tensor.dtype.name for tensor in tensors.values()} == {"float16", "bfloat16", "float32"}


def test_a_tensor_in_a_nested_object_is_found() -> None:
    tensors = open_pdparams(FIXTURES / "nest_322.pdparams")
    assert tensors["a"].read().tolist() == [1.0, 2.0]
    assert [*tensors] == ["a"]  # without the values `n`, `i` and `l`


def test_large_arrays_stay_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"w": np.arange(4000, dtype="f4").reshape(40, 100)})
    tensor = open_pdparams(path)["w"]
    data = path.read_bytes()
    place = data.index(np.arange(4000, dtype="f4").tobytes())
    path.write_bytes(data[:place] + np.full(4000, 7, "f4").tobytes() + data[place + 16000 :])
    assert (tensor.rows(3, 5) == 7).all()


@pytest.mark.slow
def test_any_range_of_an_array_spelled_as_text_is_read(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (700_001, 3), np.uint8)
    tensor = open_pdparams(write(tmp_path / "x", {"w": array}, 2))["w"]
    edges = [0, 1, 233_000, 233_017, 349_525, 466_033, 699_999, 700_001]
    for start in edges:
        for stop in edges[edges.index(start) :]:
            assert np.array_equal(tensor.rows(start, stop), array[start:stop])


def test_an_array_that_was_cut_is_whole_again(tmp_path: Path) -> None:
    array = np.arange(3000, dtype="f4").reshape(30, 100)
    flat = array.reshape(-1)
    content = {
        "w@@.0": flat[:1234],
        "w@@.1": flat[1234:],
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (30, 100), "slices": ["w@@.0", "w@@.1"]}},
    }
    tensors = open_pdparams(write(tmp_path / "x", content, 2))
    assert list(tensors) == ["w"]
    assert np.array_equal(tensors["w"].read(), array)
    assert np.array_equal(tensors["w"].rows(11, 14), array[11:14])


def test_a_static_tensor_is_read_without_eval(tmp_path: Path) -> None:
    content = {"w": Call(eval, "data", {"data": np.ones(3, "f4")})}
    assert open_pdparams(write(tmp_path / "x", content))["w"].read().tolist() == [1, 1, 1]


def test_only_pickles_with_arrays_are_claimed(tmp_path: Path) -> None:
    assert not is_pdparams(write(tmp_path / "plain", {"a": [1, 2, 3]}))
    assert not is_pdparams(tmp_path)
    (tmp_path / "text").write_text("numpy.core.multiarray")
    assert not is_pdparams(tmp_path / "text")
    assert is_pdparams(write(tmp_path / "arrays", {"a": np.ones(3)}, 2))


# Hostile and damaged files: each is refused, and the canary stays unsung

HOSTILE: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda canary: Call(os.system, f"touch {canary}"),
    "eval of an expression": lambda canary: Call(eval, f"open({str(canary)!r}, 'w')"),
    "eval with paddle's variable": lambda canary: Call(eval, f"open({str(canary)!r}, 'w')", {"data": np.ones(2)}),
    "eval of data that is no array": lambda canary: Call(eval, "data", {"data": 1}),
    "eval of data and more": lambda canary: Call(eval, "data", {"data": np.ones(2)}, {"more": 1}),
    "exec": lambda canary: Call(exec, f"open({str(canary)!r}, 'w')"),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_calls_are_refused_and_not_run(tmp_path: Path, make: Callable[[Path], Any], protocol: int) -> None:
    canary = tmp_path / "canary"
    path = write(tmp_path / "x", {"w": np.ones(3, "f4"), "bad": make(canary)}, protocol)
    with pytest.raises(MalformedInput, match="nothing was run"):
        open_pdparams(path)
    assert not canary.exists()


RECONSTRUCT = np.ones(1).__reduce__()[0]


def array(state: Any) -> Call:
    return Call(RECONSTRUCT, np.ndarray, (0,), b"b", state=state)


F4 = np.dtype("<f4")

DAMAGED: dict[str, tuple[Any, str]] = {
    "objects": (np.array([{}], dtype=object), r"unsupported element type: `\|O8`"),
    "big-endian": (np.ones(3, ">f4"), "unsupported element type: `>f4`"),
    "complex": (np.ones(3, "c8"), "unsupported element type: `<c8`"),
    "records": (np.ones(3, [("a", "<f4")]), "unsupported element type"),
    "by columns": (np.asfortranarray(np.ones((3, 4), "f4")), "stored in column-major order"),
    "no state": (Call(RECONSTRUCT, np.ndarray, (0,), b"b"), "contains no data"),
    "a short state": (array((1, (2,), F4)), "contains no data"),
    "too few bytes": (array((1, (2,), F4, False, b"1234")), "has 4 bytes for `w`, expected 8"),
    "a vast shape": (array((1, (1 << 40, 1 << 40), F4, False, b"1234")), "has 4 bytes"),
    "a negative size": (array((1, (-1,), F4, False, b"1234")), "invalid shape"),
    "a shape of text": (array((1, ("1",), F4, False, b"1234")), "invalid shape"),
    "a shape too deep": (array((1, (1,) * 40, F4, False, b"1234")), "invalid shape"),
    "numbers for bytes": (array((1, (2,), F4, False, [1, 2])), "has -1 bytes"),
    "a dtype of another kind": (array((1, (1,), "f4", False, b"1234")), "unsupported element type: a compound type"),
}


@pytest.mark.parametrize(("value", "reason"), DAMAGED.values(), ids=DAMAGED.keys())
def test_arrays_that_do_not_add_up_are_refused(tmp_path: Path, value: Any, reason: str) -> None:
    path = write(tmp_path / "x", {"w": value})
    with pytest.raises(InputRefused, match=reason):
        open_pdparams(path)


CUT: dict[str, tuple[Any, str]] = {
    "a lost piece": ({"OriginShape": (4,), "slices": ["w@@.0", "w@@.7"]}, "lacks parts of `w`, which is split into 2"),
    "no pieces": ({"OriginShape": (4,), "slices": []}, "lacks parts of `w`"),
    "another shape": ({"OriginShape": (5,), "slices": ["w@@.0", "w@@.1"]}, "has 4 elements for `w`"),
    "no shape": ({"slices": ["w@@.0"]}, "no valid description of the parts"),
    "a shape of text": ({"OriginShape": ("4",), "slices": ["w@@.0"]}, "no valid description of the parts"),
}


@pytest.mark.parametrize(("entry", "reason"), CUT.values(), ids=CUT.keys())
def test_a_cut_that_is_inconsistent_is_refused(tmp_path: Path, entry: Any, reason: str) -> None:
    content = {"w@@.0": np.ones(2, "f4"), "w@@.1": np.ones(2, "f4"), "UnpackBigParamInfor@@": {"w": entry}}
    with pytest.raises(MalformedInput, match=reason):
        open_pdparams(write(tmp_path / "x", content, 2))


def test_text_that_does_not_spell_bytes_is_refused_when_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"w": np.full(2000, 0x41, np.uint8)}, 2)
    path.write_bytes(path.read_bytes().replace(b"A" * 2000, ("€" + "A" * 1997).encode()))
    with pytest.raises(MalformedInput, match="does not decode to the bytes"):
        open_pdparams(path)["w"].read()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps({"a": np.ones(600, "f4"), "b": np.ones(2, "f2")}, 4)
    for size in range(0, len(data), 61):
        (tmp_path / "x").write_bytes(data[:size])
        with pytest.raises((MalformedInput, UnsupportedInput)):
            open_pdparams(tmp_path / "x")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bytes_never_escape_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(pickle.dumps({"a": np.ones((3, 2), "f4"), "b": np.ones(400, "f2")}, 4))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("x") / "x"
    path.write_bytes(content)
    with contextlib.suppress(InputRefused):
        assert all(tensor.read().shape == tensor.shape for tensor in open_pdparams(path).values())
