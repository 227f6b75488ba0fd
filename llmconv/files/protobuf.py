"""Protocol buffers, read on the wire level (protobuf.dev "Encoding"), without their schema.

Each field is a varint key `number << 3 | wire type`, then a varint (0), eight bytes (1), a varint length and as many
bytes (2), or four bytes (5); groups are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

from llmconv.errors import MalformedInput
from llmconv.files.source_file import open_data

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BYTES = 10
PACKED_BYTES = 64 * VARINT_BYTES
WINDOW = 1024  # bytes read at once: enough for a few fields with their names, and little of the skipped payload


class Field(NamedTuple):
    """One field of a message; the payload is at `start` to `stop` in the file."""

    number: int
    wire: int  # `VARINT`, `FIXED64`, `BYTES` or `FIXED32`
    value: int  # the number of a `VARINT`, unsigned; 0 otherwise
    start: int
    stop: int

    @property
    def signed(self) -> int:
        """The value as int32 or int64, which are both stored in 64 bits."""
        return self.value - (1 << 64) if self.value >> 63 else self.value


class Protobuf:
    """Messages of `size` bytes in a file (its name is for errors), by position; no field reaches past its message."""

    def __init__(self, file: RawIOBase | BytesIO, size: int, name: str, window: bytes = b"") -> None:
        self.size, self.name = size, name
        self._file, self._window, self._window_start = file, window, 0

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        with open_data(path) as file:
            yield cls(file, path.stat().st_size, path.name)

    def bytes(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`; MalformedInput if the file ends before."""
        low = start - self._window_start
        if low < 0 or low + stop - start > len(self._window):
            self._file.seek(start)
            self._window = self._file.read(max(WINDOW, stop - start)) or b""
            self._window_start, low = start, 0
        if stop > self.size or low + stop - start > len(self._window):
            self.refuse(f"ends at byte {self.size}, inside a field")
        return self._window[low : low + stop - start]

    def varint(self, start: int, stop: int) -> tuple[int, int]:
        """The number at `start`, of at most 64 bits, and the position after it, at most `stop`; or MalformedInput."""
        low = start - self._window_start
        if start < stop and 0 <= low < len(self._window) and self._window[low] < 0x80:  # nearly all: one byte
            return self._window[low], start + 1
        value = 0
        for count, byte in enumerate(self.bytes(start, min(stop, start + VARINT_BYTES))):
            value |= (byte & 0x7F) << 7 * count
            if byte < 0x80 and value < 1 << 64:
                return value, start + count + 1
        return self.refuse(f"has an invalid number at byte {start}")

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """The fields of the message from `start` to `stop`, in file order; MalformedInput for an invalid one."""
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
                self.refuse(f"has a field of unsupported wire type {wire} at byte {start}")
            if end > stop:
                self.refuse(f"has a field of {end - start} bytes at byte {start}, where {stop - start} bytes are left")
            yield Field(number, wire, value, start, end)
            start = end

    def numbers(self, field: Field) -> list[int]:
        """The values of one `repeated int32` or `int64` field: a single one, or all of them packed."""
        if field.wire == VARINT:
            return [field.signed]
        if field.stop - field.start > PACKED_BYTES:
            self.refuse(f"has a list of {field.stop - field.start} bytes at byte {field.start}, expected sizes")
        values, start = [], field.start
        while start < field.stop:
            value, start = self.varint(start, field.stop)
            values.append(value - (1 << 64) if value >> 63 else value)
        return values

    def text(self, field: Field, limit: int) -> str:
        """The printable text of one field; MalformedInput if it is something else or longer than `limit` bytes."""
        if field.wire != BYTES or field.stop - field.start > limit:
            self.refuse(f"has no valid name at byte {field.start}")
        try:
            text = self.bytes(field.start, field.stop).decode()
        except UnicodeDecodeError:
            text = "\0"
        if not text.isprintable():
            self.refuse(f"has a name at byte {field.start} that is not text")
        return text

    def refuse(self, problem: str) -> NoReturn:
        """Raises the MalformedInput for this file."""
        raise MalformedInput(f"`{self.name}` {problem}", hint="the file is truncated or damaged; copy it again")
