"""Ranges of bytes that a pickle of protocol 2 stores as UTF-8 text (`_codecs.encode(text, "latin1")`).

Bytes from 0x80 on take two in the file, so positions are found by counting characters; counts are kept per chunk.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np

from llmconv.errors import MalformedInput
from llmconv.files.source_file import read_into
from llmconv.tensors import Array, DType, LazyTensor

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Utf8Bytes:
    """The text: `size` bytes of UTF-8 from `position` of a file."""

    path: Path
    position: int
    size: int

    def tensor(self, dtype: DType, shape: tuple[int, ...]) -> LazyTensor:
        """The bytes as a row-major tensor; their number is checked at the first read."""
        row = prod(shape[1:]) * dtype.itemsize

        def load(start: int, stop: int) -> Array:
            if self._counts[-1] != prod(shape) * dtype.itemsize:
                raise self._damaged()
            flat = np.frombuffer(self._range(start * row, stop * row), dtype.numpy)
            return flat.reshape(stop - start, *shape[1:])

        return LazyTensor(dtype, shape, load)

    @cached_property
    def _counts(self) -> list[int]:
        """Number of characters before each chunk, and in total."""
        starts = range(0, self.size, CHUNK_BYTES)
        return list(accumulate((_characters(self._chunk(start, start + CHUNK_BYTES)) for start in starts), initial=0))

    def _range(self, start: int, stop: int) -> bytes:
        """Bytes `start:stop` of the decoded text."""
        if start == stop:
            return b""
        first = bisect_right(self._counts, start) - 1
        last = bisect_right(self._counts, stop - 1)
        raw = self._chunk(first * CHUNK_BYTES, last * CHUNK_BYTES + 1)
        whole = raw[int(_continues(raw[:1])) : len(raw) - (last * CHUNK_BYTES < self.size and not _continues(raw[-1:]))]
        try:
            decoded = whole.decode().encode("latin1")
        except ValueError as error:
            raise self._damaged() from error
        return decoded[start - self._counts[first] : stop - self._counts[first]]

    def _chunk(self, start: int, stop: int) -> bytes:
        buffer = bytearray(min(stop, self.size) - start)
        read_into(self.path, memoryview(buffer), self.position + start)
        return bytes(buffer)

    def _damaged(self) -> MalformedInput:
        return MalformedInput(
            f"`{self.path.name}` has text at byte {self.position} that does not decode to the bytes of its tensor",
            hint="the file is damaged or hostile; copy it again",
        )


def _characters(data: bytes) -> int:
    """Number of characters that begin in `data`: all bytes except 0x80 to 0xBF."""
    return int(np.count_nonzero((np.frombuffer(data, np.uint8) & 0xC0) != 0x80))


def _continues(data: bytes) -> bool:
    return bool(data) and data[0] & 0xC0 == 0x80
