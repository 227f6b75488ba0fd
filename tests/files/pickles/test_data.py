"""Reading pickles as data: the values of CPython, and attacks."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from llmconv.errors import MalformedInput
from llmconv.files.pickle_machine import DEPTH_LIMIT, Stub
from llmconv.files.pickle_reader import Global, read_pickle

SCALARS = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(SCALARS, inner) | st.lists(inner).map(tuple) | st.sets(SCALARS),
    max_leaves=20,
)


class Command:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.slow
@settings(deadline=None)
@given(VALUES, st.sampled_from([4, 5]))
def test_plain_values_read_as_python_reads_them(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), "x.pt") == value


def test_protocol_2_bytes_and_ordered_dicts_are_data() -> None:
    value = OrderedDict(model=b"\x00\xff", empty=b"", other=[True, None, 1.5])
    assert read_pickle(pickle.dumps(value, 2), "x.pt") == dict(value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_call_of_os_system_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    canary = tmp_path / "canary"
    data = pickle.dumps({"state": Command(os.system, f"touch {canary}")}, protocol)
    with pytest.raises(MalformedInput, match=r"calls `(posix|nt)\.system`; nothing was run"):
        read_pickle(data, "x.pt")
    assert not canary.exists()


def test_eval_by_the_inst_opcode_is_refused() -> None:
    with pytest.raises(MalformedInput, match="builtins.eval"):
        read_pickle(b"(S'1'\nibuiltins\neval\n.".replace(b"S'1'\n", b"X\x01\x00\x00\x001"), "x.pt")


def test_an_unknown_class_becomes_an_inert_stub() -> None:
    stub = read_pickle(pickle.dumps(timedelta(seconds=3), 2), "x.pt")
    assert isinstance(stub, Stub) and isinstance(stub.function, Global)
    assert (str(stub.function), stub.args) == ("datetime.timedelta", (0, 3, 0))


def test_a_module_that_does_not_exist_is_never_imported() -> None:
    stub = read_pickle(b"\x80\x02cno.such.module\nThing\n)\x81}X\x01\x00\x00\x00aK\x01sb.", "x.pt")
    assert (str(stub.function), stub.state) == ("no.such.module.Thing", {"a": 1})


def test_every_truncation_is_refused() -> None:
    data = pickle.dumps({"a": [1, "text", 2.5, (3, b"bytes")], "b": timedelta(1)}, 2)
    for length in range(len(data)):
        with pytest.raises(MalformedInput):
            read_pickle(data[:length], "x.pt")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_give_a_value_or_a_typed_error(data: bytes) -> None:
    try:
        read_pickle(b"\x80\x02" + data, "x.pt")
    except MalformedInput as error:
        assert error.message and error.hint


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_gives_a_value_or_a_typed_error(place: int, byte: int) -> None:
    data = bytearray(pickle.dumps({"a": [1, "text", 2.5, (3, b"bytes")], "b": timedelta(1)}, 2))
    data[place % len(data)] = byte
    try:
        read_pickle(bytes(data), "x.pt")
    except MalformedInput as error:
        assert error.message and error.hint


HOSTILE = {
    "bytes after the end": (b"N.N.", "continues after its end"),
    "an unknown opcode": (b"\xff.", "opcode 0xff"),
    "an extension code": (b"\x82\x01.", "opcode 0x82"),
    "too many marks": (b"(" * (DEPTH_LIMIT + 1) + b".", "nested deeper"),
    "a long integer": (b"\x8a\xff" + b"\x01" * 255 + b".", "over the limit"),
    "a string longer than the file": (b"X\xff\xff\xff\x00.", "truncated"),
    "a string of eight exabytes": (b"\x8e" + b"\xff" * 8 + b".", "over the limit"),
    "a reference that is not a storage": (b"X\x03\x00\x00\x00abcQ.", "not a storage"),
    "items for a number": (b"K\x01(K\x01K\x02u.", "not a dict"),
    "an item for a string": (b"X\x01\x00\x00\x00aK\x01a.", "not a list"),
    "a memo that was never put": (b"h\x05.", "truncated or damaged"),
    "an empty stack": (b"R.", "truncated or damaged"),
    "a tensor without a storage": (b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))tR.", "without a storage"),
}


@pytest.mark.parametrize(("data", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedInput, match=reason):
        read_pickle(data, "x.pt")


@pytest.mark.slow
def test_a_deep_tuple_as_key_does_not_overflow_the_stack() -> None:
    with pytest.raises(MalformedInput, match="nested deeper"):
        read_pickle(b"}" + b")" + b"\x85" * 200_000 + b"Ns.", "x.pt")


def test_nested_rebuilds_do_not_overflow_the_stack() -> None:
    function = b"ctorch._tensor\n_rebuild_from_type_v2\nq\x00"
    nested = b"h\x00N" * 5_000 + b")" + b"\x87" * 5_000
    with pytest.raises(MalformedInput):
        read_pickle(function + b"0" + nested + b"q\x010h\x00h\x01R.", "x.pt")
