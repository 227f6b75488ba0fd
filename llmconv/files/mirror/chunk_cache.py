"""ChunkCache: the parts of one object that were fetched, in a temporary file without a name."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock

CHUNK = 8 << 20
"""Bytes per request, at multiples of it: what S3 recommends for ranges ("Performance guidelines")."""

AHEAD = 8
"""Chunks that are requested before they are needed, once a file is read in order."""

Fetch = Callable[[int, int], bytes]
"""Returns bytes `start:stop` of the object."""


class ChunkCache:
    """The content of an object, of which every chunk is fetched once, when it is first needed.

    Args:
        fetch: reads a range of the object.
        size: bytes of the object.
        pool: its threads fetch.
    """

    def __init__(self, fetch: Fetch, size: int, pool: Executor) -> None:
        self.size = size
        self._fetch, self._pool = fetch, pool
        self._fd = -1
        self._chunks: dict[int, Future[None]] = {}
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that were fetched or requested."""
        return len(self._chunks) * CHUNK

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills `buffer` with the content from `offset` on; returns the number of bytes, 0 at the end.

        Raises:
            InputRefused: the object changed.
            OutputFailed: the store failed.
        """
        stop = min(offset + len(buffer), self.size)
        if stop <= offset:
            return 0
        for chunk in self._requested(offset // CHUNK, -(-stop // CHUNK)):
            chunk.result()
        return os.preadv(self._fd, [buffer[: stop - offset]], offset)

    def _requested(self, first: int, last: int) -> list[Future[None]]:
        """Chunks `first:last`; those after them are requested, too, if the one before them was."""
        with self._lock:
            self._make_file()
            ahead = AHEAD if first - 1 in self._chunks else 0
            for number in range(first, min(last + ahead, -(-self.size // CHUNK))):
                if number not in self._chunks:
                    self._chunks[number] = self._pool.submit(self._keep, number * CHUNK)
            return [self._chunks[number] for number in range(first, last)]

    def cancel(self) -> None:
        """Cancels requests that have not begun."""
        with self._lock:
            for chunk in self._chunks.values():
                chunk.cancel()

    def _make_file(self) -> None:
        """Not before it is needed: a process may have a thousand files open."""
        if self._fd < 0:
            self._fd = _nameless_file()
            weakref.finalize(self, os.close, self._fd).atexit = False

    def _keep(self, start: int) -> None:
        write_at(self._fd, self._fetch(start, min(start + CHUNK, self.size)), start)


def write_at(fd: int, content: bytes, offset: int) -> None:
    """Writes all of `content` at a position of an open file.

    Args:
        fd: descriptor of the file.
        content: to write.
        offset: position of its first byte.
    """
    rest = memoryview(content)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count


def _nameless_file() -> int:
    """The descriptor of a new file that vanishes with the process, however that ends."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
