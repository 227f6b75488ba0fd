"""MirroredFile: an object of a store as a file of its true size, whose content is fetched where it is read.

The file itself is a hole until all of the object is needed: a library that opens it unnoticed finds no header.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from llmconv.addresses import StoreAddress, parse_address
from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.paths import TEXT_LIMIT, WEIGHT_SUFFIXES, follow

if TYPE_CHECKING:
    from llmconv.stores.object_store import Head, ObjectStore

SMALL = 2 << 20  # bytes of an object that is fetched by one request, its header and its data together
HEADER = 128 << 10  # bytes for the header of a safetensors file: more than 97 % of them have
PICKLE = 1 << 20  # bytes at either end of other files: the pickle of a torch file, and the directory of its zip
WITHOUT_EDGES = ".distcp"  # suffix of files whose metadata lies in another file
FILES_WITH_EDGES = 64  # torch files whose ends stay in memory; a folder may have those of a thousand ranks


class Blocks(Protocol):
    """Where the objects are: a store, or a commit on the Hub."""

    def blocks(self, head: Head, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes `start` to `stop` of an object, see `ObjectStore.blocks`."""

    def changed(self, key: str) -> InputRefused:
        """The error for an object that is not as its head says."""


class MirroredFile:
    """An object, unchanged while it is read, and its file, made in `scratch` if incomplete; threads of `pool` fetch."""

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
        """Puts the whole object into the file for readers that open it; InputRefused if the object changed."""
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
        size = self.head.size
        spans = [(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)]
        parts = [self._pool.submit(lambda span: write_at(fd, self._fetch(*span), span[0]), span) for span in spans]
        try:
            for part in parts:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            wait(parts)  # none may write into a descriptor that is closed

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


_recent: deque[MirroredFile] = deque()  # files whose ends were fetched, the oldest first
_files: dict[str, MirroredFile] = {}  # by real path
_addresses: dict[str, StoreAddress] = {}  # what each mirror shows, by the real path of its file or folder


def add(file: MirroredFile) -> None:
    """From now on, readers of the file fetch what they read, and other code finds it complete."""
    _install_guard()
    _files[os.path.realpath(file.path)] = file


def address_of(path: Path) -> StoreAddress | None:
    """The address of a mirrored file or folder, None for any other path."""
    name = os.path.realpath(path)
    for root, address in [*_addresses.items()]:
        if name == root or name.startswith(root + os.sep):
            return address / name[len(root) :].strip(os.sep)
    return None


def remove(folder: Path) -> None:
    """Forgets all files in `folder`, which is removed."""
    start = os.path.realpath(folder) + os.sep
    for name in [name for name in [*_addresses] if name.startswith(start)]:
        _addresses.pop(name, None)
    for name in [name for name in _files if name.startswith(start)]:
        _files.pop(name).close()


def complete(folder: Path) -> None:
    """Fetches all of every file in `folder`, for readers other than llmconv's own; raises as `fetch_whole`."""
    start = os.path.realpath(folder) + os.sep
    for file in [file for name, file in _files.items() if name.startswith(start)]:
        file.fetch_whole()


def find(path: Path) -> MirroredFile | None:
    """The mirrored file at `path`; None for any other file, and for one that is complete."""
    file = _files.get(os.path.realpath(path)) if _files else None
    return file if file and not file.is_whole else None


def e_tag(path: Path) -> str | None:
    file = _files.get(os.path.realpath(path)) if _files else None
    return file.head.e_tag if file else None


@cache
def _install_guard() -> None:
    """Once, since such a hook cannot be removed; a file may be open for each rank of a checkpoint."""
    import resource  # noqa: PLC0415 - Windows has none, and is refused in one line once everything is imported

    sys.addaudithook(_complete_before_open)
    with suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _complete_before_open(event: str, arguments: tuple[Any, ...]) -> None:
    """Whatever opens a mirrored file by its path would read zeros: all of it is fetched first."""
    if event != "open" or not _files or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    if file := find(Path(os.fsdecode(arguments[0]))):
        file.fetch_whole()


CHUNK = 8 << 20  # bytes per request, at multiples of it: what S3 recommends for ranges ("Performance guidelines")
LIMIT = 1 << 30
"""Bytes on the disk, and `LEAST` chunks more for every file: few enough that most stay in memory that is used again,
which takes two thirds of the time of new memory, and is overwritten before it reaches the disk."""

# chunks of each file that has any, the current and the next: a tensor may lie in all files of a sharded checkpoint
LEAST = 2
# bytes per system call: with 8 MiB the kernel allocates huge pages in the cache, which takes five times as long
WRITE_BYTES = 256 << 10


@dataclass(eq=False)
class Chunk:
    """A place in the file for `CHUNK` bytes."""

    home: dict[int, Chunk]  # where its object finds it by its number, until the place is taken for another
    number: int  # position in the object, in chunks
    place: int  # position in the file, in chunks
    fetched: Future[None] = field(default_factory=Future)  # ends when the content is there, or could not be fetched
    users: int = 1  # its fetch and its readers; at 0 its place may be taken
    is_kept: bool = True  # it may be read again


class ChunkFile:
    """Places for chunks, `limit` bytes and `LEAST` for each object; at the limit the one unread for longest goes."""

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
        """The chunk `number` of an object whose chunks are in `home`, fetched if it is not there.

        `fetch` begins to fetch it, and `leave` must be called where that ends; and `readers` times for the readers.
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
            with tempfile.TemporaryFile() as file:  # nameless: it vanishes with the process, however that ends
                self._fd, self._places, self._pid = os.dup(file.fileno()), 0, os.getpid()
        if not self._free and self._places >= self.limit // CHUNK + LEAST * max(1, len(self._homes)):
            idle = next((chunk for chunk in self._chunks if not chunk.users), None)
            self._drop([idle] if idle else [])
        if self._free:
            return self._free.pop()
        self._places += 1
        return self._places - 1

    def leave(self, chunk: Chunk) -> None:
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
    """Writes all of `blocks`, one after the other, at byte `offset` of an open file."""
    for block in blocks:
        rest = block
        while rest:
            count = os.pwrite(fd, rest[:WRITE_BYTES], offset)
            rest, offset = rest[count:], offset + count


AHEAD, AHEAD_OF_ALL = 8, 16
"""Chunks that are requested before they are needed, once a file is read in order; at most, and of all files that are
read at the same time, but at least one of each."""

Fetch = Callable[[int, int], Iterable[memoryview]]  # returns bytes `start:stop` of the object, in blocks
CHUNK_FILE = ChunkFile()  # the chunks of this process


class ChunkCache:
    """The content of an object of `size` bytes; chunks are fetched, by `fetch` in `pool`, when they are needed."""

    def __init__(self, fetch: Fetch, size: int, pool: Executor) -> None:
        self.size = size
        self._fetch, self._pool = fetch, pool
        self._chunks: dict[int, Chunk] = {}

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills `buffer` from `offset` to the end of the chunk at most; returns its bytes; raises as `fetch_whole`."""
        stop = min(offset + len(buffer), self.size)
        if stop <= offset:
            return 0
        # requested are all chunks up to `stop`, and more if the one before or after the first was
        first, last = offset // CHUNK, -(-stop // CHUNK)
        if {first - 1, first + 1} & self._chunks.keys():
            last += max(1, min(AHEAD, AHEAD_OF_ALL // max(1, CHUNK_FILE.objects)))
        chunk = CHUNK_FILE.chunk(self._chunks, first, self._begin, readers=1)
        for number in range(first + 1, min(last, -(-self.size // CHUNK))):
            CHUNK_FILE.chunk(self._chunks, number, self._begin, readers=0)
        try:
            chunk.fetched.result()
            return CHUNK_FILE.read_into(buffer[: stop - offset], chunk, offset % CHUNK)
        finally:
            CHUNK_FILE.leave(chunk)

    def _begin(self, chunk: Chunk) -> Future[None]:
        return self._pool.submit(self._keep, chunk)

    def _keep(self, chunk: Chunk) -> None:
        start = chunk.number * CHUNK
        try:
            CHUNK_FILE.write(chunk, self._fetch(start, min(start + CHUNK, self.size)))
        finally:
            CHUNK_FILE.leave(chunk)

    def cancel(self) -> None:
        for chunk in [*self._chunks.values()]:
            if chunk.fetched.cancel():
                CHUNK_FILE.leave(chunk)

    def release(self) -> None:
        """Gives the disk space back; what is read again is fetched again. Readers at work keep what they have."""
        CHUNK_FILE.release(self._chunks)


REQUESTS_AT_ONCE = 16  # of one mirror: a connection to a store carries about 90 MB/s
SMALL_FILE = 8 << 20  # bytes up to which files that are not known as weights are fetched at once
# suffixes of files that are fetched at once: other libraries read them
SIDE_FILES = frozenset((".json", ".jsonl", ".txt", ".md", ".jinja", ".model", ".py", ".yaml", ".yml", ".tiktoken"))


def make_mirror(uri: str, folder: Path, *, whole: bool) -> Path:
    """Mirrors the object or the folder at `uri` in `folder`, and returns its path there.

    `folder` must be empty, and not be removed before `registry.remove(folder)`. Pointer files of Composer are followed.
    With `whole`, all content is fetched now, else only small files. Raises InputRefused if nothing is there, access is
    denied, or an object changed; OutputFailed if the store failed.
    """
    address = parse_address(uri)
    from llmconv.stores.object_store import ObjectStore  # noqa: PLC0415 - most places are local

    tree = StoreTree(ObjectStore(StoreAddress(address.scheme, address.bucket)))
    found = parse_address(follow(str(address), tree))
    if not (heads := tree.heads(found)):
        raise InputRefused(f"`{address}` does not exist", hint="check the bucket and the path")
    root = folder / found.name
    _addresses[os.path.realpath(root)] = found
    mirror_files(tree.store, [(root / name, head) for name, head in _below(found.key, heads)], folder)
    if whole:
        complete(folder)
    return root


def mirror_files(store: Blocks, files: Sequence[tuple[Path, Head]], folder: Path) -> None:
    """Fetches small files to their paths, and makes the others files of which only what is read is fetched."""
    pool = fetching_pool()
    for path, head in files:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            problem = f"the object `{head.key}` lies below another object"
            raise MalformedInput(problem, hint="give a folder in which no object is a folder, too") from error
    small = []
    for path, head in files:
        suffix = PurePosixPath(head.key).suffix
        if head.size and suffix not in SIDE_FILES and (suffix in WEIGHT_SUFFIXES or head.size > SMALL_FILE):
            add(MirroredFile(path, store, head, folder, pool))
        else:
            small.append((path, head))
    list(pool.map(lambda file: _fetch(store, *file), small))


@cache
def fetching_pool() -> Executor:
    return ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="fetch")


def _fetch(store: Blocks, path: Path, head: Head) -> None:
    """Writes all of a small object, with the time of the object."""
    path.write_bytes(b"".join(store.blocks(head, 0, head.size)) if head.size else b"")
    os.utime(path, ns=(head.modified, head.modified))


def _below(key: str, heads: Sequence[Head]) -> Iterator[tuple[str, Head]]:
    """Objects with their paths below `key` (empty for itself); raises MalformedInput for one that leads out of it."""
    for head in heads:
        parts = PurePosixPath(head.key.removeprefix(key).strip("/")).parts
        if ".." in parts or not head.key.isprintable():
            problem = f"the folder contains an object with the name {head.key[:80]!r}"
            raise MalformedInput(problem, hint="rename or delete it")
        yield "/".join(parts), head


class StoreTree:
    """The objects of a whole bucket, for `follow`; paths are addresses."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._found: dict[str, list[Head]] = {}

    def heads(self, place: StoreAddress) -> list[Head]:
        """The object at an address, or all objects of that folder; what its name suggests is asked for first."""
        if place.key not in self._found:
            ways = [self._object, self._folder]
            if PurePosixPath(place.key).suffix not in SIDE_FILES | WEIGHT_SUFFIXES:
                ways.reverse()
            self._found[place.key] = ways[0](place.key) or ways[1](place.key)
        return self._found[place.key]

    def _object(self, key: str) -> list[Head]:
        head = self.store.head(key) if key else None
        return [head] if head else []

    def _folder(self, key: str) -> list[Head]:
        # consoles make empty objects as folders
        return [one for one in self.store.list(key) if not one.key.endswith("/")]

    def exists(self, path: str) -> bool:
        return bool(self.heads(parse_address(path)))

    def head(self, path: str) -> bytes | None:
        place = parse_address(path)
        found = self.heads(place)
        if [one.key for one in found] != [place.key]:
            return None
        return self.store.read_range(found[0], 0, min(found[0].size, TEXT_LIMIT + 1)) if found[0].size else b""

    def roots(self, path: str) -> Iterator[str]:
        """The bucket first; any folder above the pointer may be what its names are relative to."""
        place = parse_address(path)
        parts = place.key.split("/") if place.key else []
        bucket = StoreAddress(place.scheme, place.bucket)
        yield str(bucket)
        yield from (str(bucket / "/".join(parts[:count])) for count in range(1, len(parts) + 1))
