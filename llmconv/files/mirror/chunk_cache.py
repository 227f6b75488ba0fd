"""ChunkCache: the content of one object, of which parts are fetched where they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future

from llmconv.files.mirror.chunk_file import CHUNK, Chunk, ChunkFile

AHEAD, AHEAD_OF_ALL = 8, 16
"""Chunks that are requested before they are needed, once a file is read in order; at most, and of all files that are
read at the same time, but at least one of each."""

Fetch = Callable[[int, int], Iterable[memoryview]]
"""Returns bytes `start:stop` of the object, in blocks."""

CHUNK_FILE = ChunkFile()
"""The chunks of this process."""


class ChunkCache:
    """The content of an object: a chunk is fetched when it is first needed, and again if it lost its place.

    Args:
        fetch: reads a range of the object.
        size: bytes of the object.
        pool: its threads fetch.
    """

    def __init__(self, fetch: Fetch, size: int, pool: Executor) -> None:
        self.size = size
        self._fetch, self._pool = fetch, pool
        self._chunks: dict[int, Chunk] = {}

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills `buffer` with the content from `offset` on, to the end of the chunk at most.

        Returns:
            The number of bytes, 0 at the end of the object.

        Raises:
            InputRefused: the object changed.
            OutputFailed: the store failed.
        """
        stop = min(offset + len(buffer), self.size)
        if stop <= offset:
            return 0
        chunk = self._requested(offset // CHUNK, -(-stop // CHUNK))
        try:
            chunk.fetched.result()
            return CHUNK_FILE.read_into(buffer[: stop - offset], chunk, offset % CHUNK)
        finally:
            CHUNK_FILE.leave(chunk)

    def _requested(self, first: int, last: int) -> Chunk:
        """Chunk `first`; requested are those up to `last`, and more if the one before or after it was."""
        ahead = self._ahead() if {first - 1, first + 1} & self._chunks.keys() else 0
        chunk = CHUNK_FILE.chunk(self._chunks, first, self._begin, readers=1)
        for number in range(first + 1, min(last + ahead, -(-self.size // CHUNK))):
            CHUNK_FILE.chunk(self._chunks, number, self._begin, readers=0)
        return chunk

    def _ahead(self) -> int:
        return max(1, min(AHEAD, AHEAD_OF_ALL // max(1, CHUNK_FILE.objects)))

    def _begin(self, chunk: Chunk) -> Future[None]:
        return self._pool.submit(self._keep, chunk)

    def _keep(self, chunk: Chunk) -> None:
        start = chunk.number * CHUNK
        try:
            CHUNK_FILE.write(chunk, self._fetch(start, min(start + CHUNK, self.size)))
        finally:
            CHUNK_FILE.leave(chunk)

    def cancel(self) -> None:
        """Cancels requests that have not begun."""
        for chunk in [*self._chunks.values()]:
            if chunk.fetched.cancel():
                CHUNK_FILE.leave(chunk)

    def release(self) -> None:
        """Gives the disk space back; what is read again is fetched again. Readers at work keep what they have."""
        CHUNK_FILE.release(self._chunks)
