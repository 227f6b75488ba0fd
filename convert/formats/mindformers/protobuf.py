"""Protocol buffers read as a walk over a file: fields by number and place, payloads left where they are.

Encoding (protobuf.dev "Encoding"): each field is a varint key `number << 3 | wire type`, then a varint (0), eight bytes
(1), a varint length with so many bytes (2) or four bytes (5); groups (3, 4) are not used by the formats read here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from llmconv.errors import MalformedInput

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BYTES = 10
PACKED_BYTES = 64 * VARINT_BYTES
WINDOW = 1024
"""Bytes read at once: a few fields with their names, and little of the payload that is skipped."""


@dataclass(frozen=True)
class Field:
    """One field of a message.

    Attributes:
        number: which field.
        wire: `VARINT`, `FIXED64`, `BYTES` or `FIXED32`.
        value: the number of a `VARINT`, unsigned; 0 otherwise.
        start: position of the payload in the file.
        stop: position behind it.
    """

    number: int
    wire: int
    value: int
    start: int
    stop: int

    @property
    def signed(self) -> int:
        """The value as int32 or int64, which are both written in 64 bits."""
        return self.value - (1 << 64) if self.value >> 63 else self.value


class ProtobufFile:
    """A file of messages, read by position; every length is checked against what is around it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._fd = os.open(path, os.O_RDONLY)
        self._window = b""
        self._window_start = 0

    def __enter__(self) -> ProtobufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def bytes(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`.

        Raises:
            MalformedInput: the file ends before `stop`.
        """
        low = start - self._window_start
        if low < 0 or low + stop - start > len(self._window):
            self._window = os.pread(self._fd, max(WINDOW, stop - start), start)
            self._window_start, low = start, 0
        if stop > self.size or low + stop - start > len(self._window):
            self.refuse(f"ends at byte {self.size}, inside a field")
        return self._window[low : low + stop - start]

    def varint(self, start: int, stop: int) -> tuple[int, int]:
        """A number at `start`, and the position behind it.

        Raises:
            MalformedInput: it does not end before `stop`, or is longer than ten bytes or 64 bits.
        """
        value = 0
        for count, byte in enumerate(self.bytes(start, min(stop, start + VARINT_BYTES))):
            value |= (byte & 0x7F) << 7 * count
            if byte < 0x80 and value < 1 << 64:
                return value, start + count + 1
        return self.refuse(f"has no number at byte {start}, where one should be")

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """The fields of the message that lies from `start` to `stop`, in file order.

        Raises:
            MalformedInput: a field reaches behind `stop`, or is of no known wire type.
        """
        while start < stop:
            key, start = self.varint(start, stop)
            number, wire = key >> 3, key & 7
            value, end = 0, start
            if wire == VARINT:
                value, end = self.varint(start, stop)
            elif wire == BYTES:
                length, start = self.varint(start, stop)
                end = start + length
            elif wire in (FIXED64, FIXED32):
                end = start + (8 if wire == FIXED64 else 4)
            else:
                self.refuse(f"has a field of wire type {wire} at byte {start}")
            if end > stop:
                self.refuse(
                    f"has a field at byte {start} that claims {end - start} bytes where {stop - start} are left"
                )
            yield Field(number, wire, value, start, end)
            start = end

    def numbers(self, field: Field) -> list[int]:
        """The values of one field that is `repeated int32` or `int64`: one of them, or all of them packed."""
        if field.wire == VARINT:
            return [field.signed]
        if field.stop - field.start > PACKED_BYTES:
            self.refuse(f"has a list of {field.stop - field.start} bytes at byte {field.start}, where sizes should be")
        values, start = [], field.start
        while start < field.stop:
            value, start = self.varint(start, field.stop)
            values.append(value - (1 << 64) if value >> 63 else value)
        return values

    def text(self, field: Field, limit: int) -> str:
        """The printable text of one field.

        Raises:
            MalformedInput: not such text, or longer than `limit` bytes.
        """
        if field.wire != BYTES or field.stop - field.start > limit:
            self.refuse(f"has no name at byte {field.start}, where one should be")
        try:
            text = self.bytes(field.start, field.stop).decode()
        except UnicodeDecodeError:
            text = "\0"
        if not text.isprintable():
            self.refuse(f"has a name at byte {field.start} that is no text")
        return text

    def refuse(self, problem: str) -> NoReturn:
        """Raises the MalformedInput for this file."""
        raise MalformedInput(f"`{self.path.name}` {problem}", hint="the file is truncated or damaged; copy it again")
