"""Message: what a client and the stage of a model in another process send each other; data, never code.

4 bytes    b"LST" and the version of the protocol
4 bytes    length of the header, little-endian
8 bytes    length of the body
header     {"kind": "run", fields …, "tensors": [{"name": "hidden_states.8", "dtype": "float32", "shape": [1, 1, 64]}]}
body       the elements of the tensors, little-endian, in the order of the header
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from llmconv.checkpoint import parse_object
from llmconv.errors import LlmconvError
from llmconv.tensors import Array

MAGIC = b"LST1"
PREFIX = struct.Struct("<4sIQ")

MAX_HEADER, MAX_BODY = 1 << 20, 1 << 30
"""Maximum sizes in bytes: hidden states of 65,000 tokens at a width of 4,096 in float32."""
MAX_TENSORS, MAX_AXES = 64, 8

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("float32", "float16", "float64", "int64", "int32", "int8", "bool")
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


class BadMessage(ValueError):
    """Bytes that are not a message of this protocol."""


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: what it asks or answers.
        fields: other fields of its header.
        tensors: arrays by name.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Array] = field(default_factory=dict)

    def encode(self) -> list[bytes]:
        """The bytes, in parts.

        Raises:
            BadMessage: it is larger than the receiver accepts.
        """
        arrays = {name: np.asarray(array) for name, array in self.tensors.items()}
        listed = [{"name": n, "dtype": a.dtype.name, "shape": list(a.shape)} for n, a in arrays.items()]
        header = json.dumps({**self.fields, "kind": self.kind, "tensors": listed}).encode()
        prefix = _checked_prefix(len(header), sum(array.nbytes for array in arrays.values()), MAX_BODY)
        body = (array.astype(DTYPES[array.dtype.name], copy=False).tobytes() for array in arrays.values())
        return [prefix, header, *body]

    def number(self, name: str, most: int = 2**53) -> int:
        """A field that is a whole number from 0 to `most`.

        Raises:
            BadMessage: it is missing, or something else.
        """
        return as_number(self.fields.get(name), f"`{name}`", most)

    def text(self, name: str) -> str:
        """A field that is a text.

        Raises:
            BadMessage: it is missing, or something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise BadMessage(f"`{name}` is not a text")
        return value


def as_number(value: Any, what: str, most: int = 2**53) -> int:
    """A whole number from 0 to `most`.

    Args:
        value: a value in a header.
        what: its name in the error.
        most: the largest number.

    Raises:
        BadMessage: it is something else.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise BadMessage(f"{what} is not a number from 0 to {most}")
    return value


def read_message(read: Callable[[int], bytearray], max_body: int = MAX_BODY) -> Message:
    """The next message.

    Args:
        read: returns exactly this number of bytes.
        max_body: maximum size of the tensors in bytes.

    Raises:
        BadMessage: what arrives is not a message, or is larger than the maximum.
    """
    magic, header_bytes, body_bytes = PREFIX.unpack(read(PREFIX.size))
    if magic != MAGIC:
        other = magic[:3] == MAGIC[:3]
        raise BadMessage("another version of the protocol" if other else "not a message of a stage of llmconv")
    _checked_prefix(header_bytes, body_bytes, max_body)
    header = _header(read(header_bytes))
    kind, listed = header.pop("kind", None), header.pop("tensors", [])
    if not isinstance(kind, str) or not isinstance(listed, list) or len(listed) > MAX_TENSORS:
        raise BadMessage("the header is not that of a message")
    places = [_place(one) for one in listed]
    if sum(size for *_, size in places) != body_bytes or len({name for name, *_ in places}) != len(places):
        raise BadMessage("the sizes of the tensors are not that of the body")
    return Message(kind, header, _tensors(places, read(body_bytes)))


def _checked_prefix(header_bytes: int, body_bytes: int, max_body: int) -> bytes:
    if header_bytes > MAX_HEADER or body_bytes > max_body:
        raise BadMessage(f"a message of {header_bytes + body_bytes:,} bytes is too large")
    return PREFIX.pack(MAGIC, header_bytes, body_bytes)


def _header(content: bytearray) -> dict[str, Any]:
    try:
        return parse_object(bytes(content), "header")
    except LlmconvError as error:
        raise BadMessage(error.message) from error


def _place(listed: Any) -> tuple[str, np.dtype[Any], list[int], int]:
    """Name, dtype, shape and size in bytes of a tensor in a header."""
    if not isinstance(listed, dict):
        raise BadMessage("a tensor is not an object")
    name, dtype, shape = (listed.get(key) for key in ("name", "dtype", "shape"))
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadMessage("a tensor has no name, or an unknown dtype")
    if not isinstance(shape, list) or len(shape) > MAX_AXES:
        raise BadMessage("the shape of a tensor is not a list of a few numbers")
    sizes = [as_number(axis, "an axis", MAX_BODY) for axis in shape]
    return name, DTYPES[dtype], sizes, prod(sizes) * DTYPES[dtype].itemsize


def _tensors(places: list[tuple[str, np.dtype[Any], list[int], int]], body: bytearray) -> dict[str, Array]:
    tensors, start = {}, 0
    for name, dtype, shape, size in places:
        array = np.frombuffer(body, dtype, prod(shape), start).reshape(shape)
        tensors[name] = np.require(array, requirements="A")
        start += size
    return tensors
