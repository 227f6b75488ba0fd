"""MirroredFile: an object of a store as a file of its true size, whose content is fetched where it is read.

The file itself is a hole until all of the object is needed: a library that opens it unnoticed finds no header.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from pathlib import Path
from threading import Lock
from typing import Protocol

from llmconv.errors import InputRefused
from llmconv.files.mirror.chunk_cache import ChunkCache
from llmconv.files.mirror.chunk_file import CHUNK, write_at
from llmconv.stores.object_store import Head

SMALL = 2 << 20
"""Bytes of an object that is fetched by one request, its header and its data together."""

HEADER = 128 << 10
"""Bytes for the header of a safetensors file: more than 97 % of them have."""

PICKLE = 1 << 20
"""Bytes at either end of other files: the pickle of a torch file, and the directory of its zip."""

WITHOUT_EDGES = ".distcp"
"""Suffix of files whose metadata lies in another file."""


FILES_WITH_EDGES = 64
"""Torch files whose ends stay in memory; a folder may have those of a thousand ranks."""


class Blocks(Protocol):
    """Where the objects are: a store, or a commit on the Hub."""

    def blocks(self, head: Head, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes `start` to `stop` of an object, see `ObjectStore.blocks`."""

    def changed(self, key: str) -> InputRefused:
        """The error for an object that is not as its head says."""


class MirroredFile:
    """An object, and the file that stands for it.

    Args:
        path: the file, which this makes.
        store: contains the object.
        head: of the object; it must not change while it is read.
        scratch: folder for a file that is not complete, on the same disk.
        pool: its threads fetch.
    """

    def __init__(self, path: Path, store: Blocks, head: Head, scratch: Path, pool: Executor) -> None:
        self.path, self.head, self.is_whole = path, head, False
        self._store, self._scratch, self._pool = store, scratch, pool
        self._cache = ChunkCache(self._fetch, head.size, pool)
        self._edges: dict[int, Future[bytes]] = {}
        self._lock, self._whole_lock = Lock(), Lock()
        path.touch()
        os.truncate(path, head.size)
        self._set_time(path)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills `buffer` with data; see `ChunkCache.read_into`."""
        return self._cache.read_into(buffer, offset)

    def peek_into(self, buffer: memoryview, offset: int) -> int:
        """As `read_into`, for headers: what lies at the ends of the object is fetched without the data next to it."""
        for start, edge in self._requested_edges(offset).items():
            content = edge.result()
            if start <= offset < start + len(content):
                found = content[offset - start :][: len(buffer)]
                buffer[: len(found)] = found
                return len(found)
        return self.read_into(buffer, offset)

    def _requested_edges(self, offset: int) -> dict[int, Future[bytes]]:
        """The ends of the object by position, requested together; none if `offset` is in neither."""
        size, suffix = self.head.size, self.path.suffix
        edge = HEADER if suffix == ".safetensors" else PICKLE
        if size <= SMALL or suffix == WITHOUT_EDGES or edge <= offset < size - edge:
            return {}
        with self._lock:
            if not self._edges and suffix == ".safetensors":
                self._edges[0] = self._pool.submit(self._header)
            elif not self._edges:
                self._edges[0] = self._pool.submit(self._edge, 0, edge)
                self._edges[size - edge] = self._pool.submit(self._edge, size - edge, size)
                _recent.append(self)
            edges = self._edges
        if len(_recent) > FILES_WITH_EDGES:
            _recent.popleft().forget_edges()
        return edges

    def _header(self) -> bytes:
        """The header of a safetensors file, without the data after it: small enough to stay, of any number of files."""
        content = self._edge(0, HEADER)
        return content[: 8 + int.from_bytes(content[:8], "little")]

    def forget_edges(self) -> None:
        """Gives the memory of both ends back; they are fetched again where they are read again."""
        with self._lock:
            self._edges = {}

    def fetch_whole(self) -> None:
        """Puts the whole object into the file, for readers that open it themselves.

        Raises:
            InputRefused: the object changed.
            OutputFailed: the store failed.
        """
        with self._whole_lock:
            if self.is_whole:
                return
            made = self._scratch / f"fetching-{id(self)}"
            fd = os.open(made, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            try:
                self._fill(fd)
            finally:
                os.close(fd)
            self._set_time(made)
            made.replace(self.path)
            self.is_whole = True
            self._cache.release()

    def _fill(self, fd: int) -> None:
        parts = [self._pool.submit(self._copy, fd, start) for start in range(0, self.head.size, CHUNK)]
        try:
            for part in parts:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            wait(parts)  # none may write into a descriptor that is closed

    def _copy(self, fd: int, start: int) -> None:
        write_at(fd, self._fetch(start, min(start + CHUNK, self.head.size)), start)

    def close(self) -> None:
        """Cancels requests that have not begun, and gives everything back."""
        self._cache.cancel()
        self._cache.release()
        self.forget_edges()

    def _edge(self, start: int, stop: int) -> bytes:
        return b"".join(self._fetch(start, stop))

    def _fetch(self, start: int, stop: int) -> Iterator[memoryview]:
        got = 0
        for block in self._store.blocks(self.head, start, stop):
            got += len(block)
            if got > stop - start:
                break
            yield block
        if got != stop - start:
            raise self._store.changed(self.head.key)

    def _set_time(self, path: Path) -> None:
        os.utime(path, ns=(self.head.modified, self.head.modified))


_recent: deque[MirroredFile] = deque()
"""Files whose ends were fetched, the oldest first."""
