"""ChunkFile: the chunks that were fetched for all readers, in one temporary file without a name and of bounded size."""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

CHUNK = 8 << 20
"""Bytes per request, at multiples of it: what S3 recommends for ranges ("Performance guidelines")."""

LIMIT = 1 << 30
"""Bytes on the disk, and `LEAST` chunks more for every file: few enough that most stay in memory that is used again,
which takes two thirds of the time of new memory, and is overwritten before it reaches the disk."""

LEAST = 2
"""Chunks of each file that has any, the current and the next: a tensor may lie in all files of a sharded checkpoint."""

WRITE_BYTES = 256 << 10
"""Bytes per system call: with 8 MiB the kernel allocates huge pages in the cache, which takes five times as long."""


@dataclass(eq=False)
class Chunk:
    """A place in the file for `CHUNK` bytes.

    Attributes:
        home: where its object finds it by its number, until the place is taken for another.
        number: position in the object, in chunks.
        place: position in the file, in chunks.
        fetched: ends when the content is there, or could not be fetched.
        users: its fetch and its readers; at 0 its place may be taken.
        is_kept: it may be read again.
    """

    home: dict[int, Chunk]
    number: int
    place: int
    fetched: Future[None] = field(default_factory=Future)
    users: int = 1
    is_kept: bool = True


class ChunkFile:
    """Places for chunks; at the limit, the chunk that was not read for the longest time loses its place.

    Args:
        limit: bytes of the file, and `LEAST` chunks more for every object; more only if as many are in use.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._lock = Lock()
        self._chunks: OrderedDict[Chunk, None] = OrderedDict()
        self._homes: set[int] = set()
        self._free: list[int] = []
        self._fd = self._places = self._pid = -1

    @property
    def objects(self) -> int:
        """How many objects have chunks in the file."""
        return len(self._homes)

    def chunk(self, home: dict[int, Chunk], number: int, fetch: Callable[[Chunk], Future[None]], readers: int) -> Chunk:
        """The chunk `number` of an object, which is fetched if it is not there.

        Args:
            home: the object's chunks.
            number: of the chunk.
            fetch: begins to fetch it; `leave` must be called where that ends.
            readers: how many times `leave` will be called for them.
        """
        with self._lock:
            if self._fd >= 0 and os.getpid() != self._pid:
                raise RuntimeError("a fork cannot read files of its parent, which may fill their places anew")
            if number not in home:
                chunk = home[number] = Chunk(home, number, self._take_place())
                self._chunks[chunk] = None
                self._homes.add(id(home))
                chunk.fetched = fetch(chunk)
            chunk = home[number]
            self._chunks.move_to_end(chunk)
            chunk.users += readers
            return chunk

    def _take_place(self) -> int:
        if self._fd < 0:
            self._fd, self._places, self._pid = _nameless_file(), 0, os.getpid()
        if not self._free and self._places >= self.limit // CHUNK + LEAST * max(1, len(self._homes)):
            idle = next((chunk for chunk in self._chunks if not chunk.users), None)
            self._drop([idle] if idle else [])
        if self._free:
            return self._free.pop()
        self._places += 1
        return self._places - 1

    def leave(self, chunk: Chunk) -> None:
        """Ends a use of a chunk."""
        with self._lock:
            chunk.users -= 1
            if not chunk.users and not chunk.is_kept:
                self._drop([chunk])
                self._close_if_empty()

    def release(self, home: dict[int, Chunk]) -> None:
        """Gives the places of an object's chunks back, as soon as nobody uses them."""
        with self._lock:
            for chunk in home.values():
                chunk.is_kept = False
            self._drop([chunk for chunk in home.values() if not chunk.users])
            self._close_if_empty()

    def _drop(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            del self._chunks[chunk], chunk.home[chunk.number]
            self._free.append(chunk.place)
            if not chunk.home:
                self._homes.discard(id(chunk.home))

    def _close_if_empty(self) -> None:
        """Gives the disk space back."""
        if not self._chunks and self._fd >= 0:
            os.close(self._fd)
            self._fd, self._free = -1, []

    def write(self, chunk: Chunk, blocks: Iterable[memoryview]) -> None:
        """Fills a chunk with `blocks`, which have up to `CHUNK` bytes together."""
        write_at(self._fd, blocks, chunk.place * CHUNK)

    def read_into(self, buffer: memoryview, chunk: Chunk, offset: int) -> int:
        """Fills `buffer` with the content of a chunk from `offset` on; returns the number of bytes."""
        return os.preadv(self._fd, [buffer[: CHUNK - offset]], chunk.place * CHUNK + offset)


def write_at(fd: int, blocks: Iterable[memoryview], offset: int) -> None:
    """Writes all of `blocks`, one after the other, at a position of an open file.

    Args:
        fd: descriptor of the file.
        blocks: to write.
        offset: position of the first byte.
    """
    for block in blocks:
        rest = block
        while rest:
            count = os.pwrite(fd, rest[:WRITE_BYTES], offset)
            rest, offset = rest[count:], offset + count


def _nameless_file() -> int:
    """The descriptor of a new file that vanishes with the process, however that ends."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
