"""Messages between processes: what is sent arrives, and nothing else is accepted."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmconv.runtime.stages.connection import MAGIC, MAX_BODY, MAX_HEADER, PREFIX, BadMessage, Message, read_message

DTYPES = [np.float32, np.float16, np.float64, np.int64, np.int32, np.int8, np.bool_, ml_dtypes.bfloat16]


def read(content: bytes, max_body: int = MAX_BODY) -> Message:
    """The message in a stream of these bytes."""
    stream = io.BytesIO(content)

    def exactly(size: int) -> bytearray:
        found = bytearray(stream.read(size))
        if len(found) < size:
            raise EOFError
        return found

    return read_message(exactly, max_body)


def encoded(header: Any, body: bytes = b"", magic: bytes = MAGIC) -> bytes:
    """The bytes of a message with this header."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(magic, len(content), len(body)) + content + body


def tensor(**changes: Any) -> dict[str, Any]:
    """A header with one tensor of 8 bytes."""
    return {"kind": "run", "tensors": [{"name": "x", "dtype": "float32", "shape": [2], **changes}]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_and_shape_arrive(dtype: Any) -> None:
    tensors = {
        "odd": np.ones(3, np.int8),
        "x": np.arange(24).reshape(2, 3, 4).astype(dtype),
        "e": np.zeros((0, 5), dtype),
    }
    sent = Message("run", {"use": "decode", "edits": [["cut", [3], 0]]}, {**tensors, "scalar": np.array(2, np.float32)})
    found = read(b"".join(sent.encode()))
    assert (found.kind, found.fields) == ("run", sent.fields)
    for name, array in sent.tensors.items():
        assert (found.tensors[name].dtype, found.tensors[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found.tensors[name], array)
        assert found.tensors[name].flags.aligned


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not a message"),
        (b"\x80\x05\x95" + bytes(40), "not a message"),
        (encoded({"kind": "run"}, magic=b"LST2"), "another version"),
        (PREFIX.pack(MAGIC, MAX_HEADER + 1, 0), "too large"),
        (PREFIX.pack(MAGIC, 2**32 - 1, 2**64 - 1), "too large"),
        (PREFIX.pack(MAGIC, 2, MAX_BODY + 1), "too large"),
        (encoded([]), "not a JSON object"),
        (encoded(b"\xff\xfe"), "not valid JSON"),
        (encoded(b"[" * 100_000), "JSON"),
        (encoded(b'{"kind": "run", "a": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001), "header"),
        (encoded({"kind": 1}), "not that of a message"),
        (encoded({"kind": "run", "tensors": {}}), "not that of a message"),
        (encoded({"kind": "run", "tensors": [None] * 65}), "not that of a message"),
        (encoded({"kind": "run", "tensors": [1]}), "not an object"),
        (encoded(tensor(name=1), bytes(8)), "no name"),
        (encoded(tensor(dtype="object"), bytes(8)), "unknown dtype"),
        (encoded(tensor(dtype=["float32"]), bytes(8)), "unknown dtype"),
        (encoded(tensor(shape=2), bytes(8)), "shape"),
        (encoded(tensor(shape=[1] * 9), bytes(8)), "shape"),
        (encoded(tensor(shape=[-2, -1]), bytes(8)), "an axis"),
        (encoded(tensor(shape=[2.0]), bytes(8)), "an axis"),
        (encoded(tensor(shape=[True, 2]), bytes(8)), "an axis"),
        (encoded(tensor(shape=[2**30] * 8), bytes(8)), "sizes"),
        (encoded(tensor(), bytes(7)), "sizes"),
        (encoded({"kind": "run", "tensors": tensor()["tensors"] * 2}, bytes(16)), "sizes"),
    ],
)
def test_anything_else_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(BadMessage, match=problem):
        read(content)


def test_an_announced_size_takes_no_memory_before_the_bytes_arrive() -> None:
    content = PREFIX.pack(MAGIC, 100, MAX_BODY) + json.dumps(tensor(shape=[MAX_BODY // 4])).ljust(100).encode()
    tracemalloc.start()
    with pytest.raises(EOFError):
        read(content)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_a_message_that_is_too_large_is_not_sent() -> None:
    huge = np.broadcast_to(np.float32(0), (1 << 28 | 1,))
    with pytest.raises(BadMessage, match="too large"):
        Message("run", {}, {"x": huge}).encode()


HEADERS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TENSORS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "y"]) | HEADERS,
        "dtype": st.sampled_from(["float32", "int8", "object", "V8"]) | HEADERS,
        "shape": st.lists(st.integers(-2, 2**62), max_size=10) | HEADERS,
    }
)


@pytest.mark.slow
@given(st.binary(max_size=64), st.fixed_dictionaries({"kind": HEADERS, "tensors": HEADERS | st.lists(TENSORS)}))
def test_no_bytes_lead_to_another_error(noise: bytes, header: dict[str, Any]) -> None:
    for content in (noise, encoded(header, noise), encoded(noise, noise), encoded(header)[: len(noise)]):
        try:
            found = read(content)
        except (BadMessage, EOFError):
            continue
        assert sum(array.nbytes for array in found.tensors.values()) <= len(noise)
