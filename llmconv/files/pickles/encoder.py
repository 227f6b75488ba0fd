"""Writes values as a pickle, with the opcodes that checkpoint files need; no Python object is pickled.

Opcodes: Python's `Lib/pickletools.py`. Protocol 2 is what torch writes; arrays inside the pickle need protocol 4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmconv.tensors import LazyTensor, Piece


@dataclass(frozen=True)
class PickledName:
    """A class or function, by name."""

    module: str
    name: str


@dataclass(frozen=True)
class PickledCall:
    """The result of `function(*args)`, followed by BUILD with `state` if there is one."""

    function: PickledName
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True)
class PersistentId:
    """A reference to something outside the pickle, by its persistent id."""

    id: tuple[Any, ...]


def pickle_pieces(value: Any, protocol: int = 2) -> Iterator[Piece]:
    """Yields the pickle of a value made of dicts, tuples, text, numbers, None and the records of this module.

    A LazyTensor becomes a bytes object (protocol 4 only) whose content is streamed.
    """
    text = bytearray(b"\x80" + bytes([protocol]))
    for part in _parts(value):
        if isinstance(part, LazyTensor):
            assert protocol >= 4
            yield bytes(text + b"\x8e" + struct.pack("<Q", part.nbytes))
            yield part
            text.clear()
        else:
            text += part
    yield bytes(text + b".")


def _parts(value: Any) -> Iterator[bytes | LazyTensor]:
    if isinstance(value, LazyTensor):
        yield value
    elif isinstance(value, Mapping):
        yield b"}("
        for key, item in value.items():
            yield from _parts(key)
            yield from _parts(item)
        yield b"u"
    elif isinstance(value, tuple):
        yield from _tuple(value)
    elif isinstance(value, PersistentId):
        yield from _parts(value.id)
        yield b"Q"
    elif isinstance(value, PickledCall):
        yield from _parts(value.function)
        yield from _parts(value.args)
        yield b"R"
        if value.state is not None:
            yield from _parts(value.state)
            yield b"b"
    else:
        yield _scalar(value)


def _tuple(value: tuple[Any, ...]) -> Iterator[bytes | LazyTensor]:
    yield b"(" if value else b")"
    for item in value:
        yield from _parts(item)
    yield b"t" if value else b""


def _scalar(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        return b"\x8a\x08" + struct.pack("<q", value)
    if isinstance(value, str):
        encoded = value.encode()
        return b"X" + struct.pack("<I", len(encoded)) + encoded
    if isinstance(value, bytes):
        return b"B" + struct.pack("<I", len(value)) + value
    if isinstance(value, PickledName):
        return f"c{value.module}\n{value.name}\n".encode()
    raise TypeError(f"no opcode for {type(value).__name__}")
