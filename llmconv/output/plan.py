"""Plan: all files that a run will write, with every name, shape and size known before the first is written.

A file is written as a stream: while a block is written, later rows are computed and earlier ones hashed. A bounded
number of row blocks is in flight, so memory depends on the block size and not on the model. Where it goes is a
Destination: what the three kinds of places have in common stands at the end of this file.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, Self

from llmconv.background import LOOK_AHEAD, BackgroundQueue, prefetch
from llmconv.checkpoint import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS, INDEX, Checkpoint
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, OutputFailed, UsageProblem
from llmconv.files import source_file
from llmconv.files.copying import flush_data
from llmconv.files.safe_folder import FULL, Link, write_fully
from llmconv.files.safetensors_file import NAME_LIMIT, FileTensor, file_of, holds, safetensors_pieces
from llmconv.output.manifest import MANIFEST, Manifest, parse_manifest
from llmconv.tensors import Container, LazyTensor, Piece, as_bytes

MODEL = "model"  # beginning of the names of weight files in a Hugging Face folder
DEFAULT_SIZE = "5GB"  # default size of a shard, as in huggingface_hub
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Shard:
    """One file to write."""

    name: str
    tensors: Mapping[str, LazyTensor]  # in order
    container: Container = safetensors_pieces  # the format of the file
    copy_of: Path | None = None  # an existing file with exactly these tensors, which is copied instead
    prefix: str = ""  # of the names of its tensors outside of the file, such as `2_Dense.` for a module after the model

    def __repr__(self) -> str:
        return f"<Shard {self.name}: {len(self.tensors)} tensors, {self.nbytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Plan:
    """The files that a run will write; printed by `--dry-run`."""

    checkpoint: Checkpoint  # the source of the tensors
    shards: tuple[Shard, ...]  # the files with tensors
    # other files, name to content, in the order of writing
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # parts of the source that the output lacks, one line each
    found: bool = False  # the output was complete before the run, which wrote nothing
    part: str = ""  # the part of the output, such as `3/16`, whose shards these are; nothing was published
    # hash of what tensors depend on besides the sources and options: numbers that were measured, files of settings
    measured: str = ""

    def __repr__(self) -> str:
        count = sum(len(shard.tensors) for shard in self.shards)
        return f"<Plan {self.checkpoint.kind}: {count} tensors, {self.nbytes:,} bytes in {len(self.shards)} file(s)>"

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in all shards."""
        return sum(shard.nbytes for shard in self.shards)


def plan_checkpoint(
    checkpoint: Checkpoint,
    max_shard_size: str | int = DEFAULT_SIZE,
    stem: str = MODEL,
    parts: Mapping[str, int] | None = None,
    together: Sequence[Collection[str]] = (),
) -> Plan:
    """Plans a Hugging Face folder of the tensors, in order; a shard of unchanged tensors as a copy of their file.

    `max_shard_size` (a larger tensor gets its own) is in bytes or as `5GB` (else UsageProblem); `keep` keeps the shards
    of a Hugging Face folder, and means `5GB` for other sources. Names of files begin with `stem`; tensors of different
    numbers in `parts` (0 if in none) are not in one file; tensors of one of the groups `together`, which are new and
    adjacent, are. Raises InputRefused for no tensors, or a name that cannot be written.
    """
    if not checkpoint and not checkpoint.adapter:
        raise InputRefused(f"`{checkpoint.path}` contains no tensors", hint="look at it with `llmconv inspect`")
    kept = _is_kept(max_shard_size)
    limit = parse_size(DEFAULT_SIZE if kept else max_shard_size)
    for name in checkpoint:
        if not name or name == "__metadata__" or len(name) > NAME_LIMIT or not name.isprintable():
            problem = f"`{checkpoint.path.name}` has a tensor named {name[:40]!r}, which is invalid in safetensors"
            raise MalformedInput(problem, hint="save the model with its own names; is the file damaged or hostile?")
    modules = {name: home for name, home in checkpoint.files.items() if "/" in home and name in checkpoint}
    numbers = {name: (parts or {}).get(name, 0) for name in checkpoint if name not in modules}
    groups = []
    for part in sorted({*numbers.values()}):
        tensors = {name: checkpoint[name] for name, number in numbers.items() if number == part}
        if kept:
            groups += by_source(tensors, checkpoint.files, limit, together)
        else:
            groups += by_size(tensors, limit, together)
    names = [f"{stem}-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    names = [f"{stem}.safetensors"] if len(names) == 1 else names
    shards = tuple(Shard(name, group, copy_of=file_of(group)) for name, group in zip(names, groups, strict=True))
    # side files, `config.json` if there is a model, and last the index
    small_files = dict(checkpoint.side_files)
    if shards:
        small_files["config.json"] = json_bytes(checkpoint.config)
    if len(shards) > 1:
        weight_map = {name: shard.name for shard in shards for name in shard.tensors}
        metadata = {"total_size": sum(shard.nbytes for shard in shards)}
        small_files[INDEX.replace(MODEL, stem, 1)] = json_bytes({"metadata": metadata, "weight_map": weight_map})
    for home in dict.fromkeys(modules.values()):  # of a module after the model, with names as in the source
        prefix = f"{home.rpartition('/')[0]}."
        group = {name.removeprefix(prefix): checkpoint[name] for name, place in modules.items() if place == home}
        shards += (Shard(home, group, copy_of=file_of(group), prefix=prefix),)
    if checkpoint.adapter:
        place = f"{ADAPTER_FOLDER}/" if shards else ""
        shards = (*shards, Shard(place + ADAPTER_WEIGHTS, checkpoint.adapter.tensors))
        small_files[place + ADAPTER_CONFIG] = json_bytes(checkpoint.adapter.config)
    return Plan(checkpoint, shards, small_files)


def require_shard_size(max_shard_size: str | int) -> None:
    """Raises UsageProblem for anything but `keep`, a size such as `5GB`, or positive bytes; before anything is read."""
    if not _is_kept(max_shard_size):
        parse_size(max_shard_size)


def _is_kept(max_shard_size: str | int) -> bool:
    return str(max_shard_size).lower() == KEEP


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `5GB`, `500MB` or `1000` in decimal units; raises UsageProblem for another, or zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", str(text).strip().upper())
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if size <= 0:
        raise UsageProblem(f"invalid size `{text}` of a file", hint="write `--max-shard-size` as `5GB` or `500MB`")
    return size


def json_bytes(content: Any) -> bytes:
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON has to escape
        return (json.dumps(content, indent=2) + "\n").encode()


KEEP = "keep"  # instead of a size: keep the files of the source
Group = dict[str, LazyTensor]


def by_size(tensors: Mapping[str, LazyTensor], limit: int, together: Sequence[Collection[str]] = ()) -> list[Group]:
    """Groups tensors in order into files of at most `limit` bytes; a larger tensor gets its own."""
    groups: list[Group] = []
    size = 0
    for unit in _units(tensors, together, limit):
        more = sum(tensor.nbytes for tensor in unit.values())
        if not groups or size + more > limit:
            groups.append({})
            size = 0
        groups[-1] |= unit
        size += more
    return groups


def _units(tensors: Mapping[str, LazyTensor], together: Sequence[Collection[str]], limit: int) -> list[Group]:
    """The tensors in order, those of one group of at most `limit` bytes as one unit."""
    sizes = [sum(tensors[name].nbytes for name in names if name in tensors) for names in together]
    groups = [(at, names) for at, (names, size) in enumerate(zip(together, sizes, strict=True)) if size <= limit]
    group_of = {name: at for at, names in groups for name in names}
    units: dict[int | str, Group] = {}
    for name, tensor in tensors.items():
        units.setdefault(group_of.get(name, name), {})[name] = tensor
    return list(units.values())


def by_source(
    tensors: Mapping[str, LazyTensor], files: Mapping[str, str], limit: int, together: Sequence[Collection[str]] = ()
) -> list[Group]:
    """Groups tensors in order by their source files; a new tensor, or group, joins the previous one's file if it fits.

    `files` maps tensors to their file in the source; `limit`, in bytes, is at least the size of the largest source
    file.
    """
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if name in files:
            sizes[files[name]] = sizes.get(files[name], 0) + tensor.nbytes
    room = max([limit, *sizes.values()])
    groups: dict[str, Group] = {}
    home = next(iter(sizes), "")
    for unit in _units(tensors, together, limit):
        name, size = next(iter(unit)), sum(tensor.nbytes for tensor in unit.values())
        home = files.get(name, home)
        if name not in files:
            while sizes.get(home) and sizes[home] + size > room:
                home += "+"
            sizes[home] = sizes.get(home, 0) + size
        groups.setdefault(home, {}).update(unit)
    return list(groups.values())


WRITTEN_BYTES = 1 << 20  # of a block that is written: larger ones cost memory, and no run is faster
FLUSH_BYTES = 32 << 20  # written bytes are flushed in steps of this size, so that the last fsync has little left to do
FALLOC_FL_KEEP_SIZE = 1  # reserves blocks without changing the length of the file (`linux/falloc.h`)


class ShardContent:
    """The bytes of one file in order; meanwhile later rows are computed, and earlier ones hashed, on other threads."""

    def __init__(self, shard: Shard) -> None:
        self.pieces = list(shard.container(shard.tensors))
        self.nbytes = shard.nbytes
        self._size = 0
        self._sha256 = hashlib.sha256()
        self._crcs = [0] * len(shard.tensors) if any(map(callable, self.pieces)) else []

    def blocks(self) -> Generator[memoryview, None, None]:
        """All bytes of the file, to be taken once."""
        with BackgroundQueue(LOOK_AHEAD) as hashing:
            for number, content in prefetch((partial(_content, *block) for block in _blocks(self.pieces)), LOOK_AHEAD):
                if callable(content):
                    hashing.finish()
                block = memoryview(content(self._crcs)) if callable(content) else content
                hashing.submit(self._add, number, block)
                self._size += len(block)
                yield block
            hashing.finish()

    def _add(self, number: int | None, block: memoryview) -> None:
        """Adds the next bytes, which belong to tensor `number`, if any, to the checksums."""
        self._sha256.update(block)
        if number is not None and self._crcs:
            self._crcs[number] = zlib.crc32(block, self._crcs[number])

    @property
    def entry(self) -> dict[str, Any]:
        """The manifest entry: bytes and sha256 of the blocks that were taken."""
        return {"bytes": self._size, "sha256": self._sha256.hexdigest()}


def stream_shard(file: IO[bytes], shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
    """Writes the new, unbuffered `file` durably, reporting bytes to `advance`; returns bytes and sha256."""
    content = ShardContent(shard)
    size = flushed = 0
    with BackgroundQueue(1) as flushing, closing(content.blocks()) as blocks:
        # reserves all blocks at once where the file system can (`fallocate(2)`): a fifth less work for ext4
        libc = ctypes.CDLL(None)
        if hasattr(libc, "fallocate"):
            libc.fallocate(file.fileno(), FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(content.nbytes))
        for block in blocks:
            write_fully(file.fileno(), block)
            advance(len(block))
            size += len(block)
            if size - flushed > FLUSH_BYTES and flushing.is_idle():
                flushing.submit(flush_data, file.fileno())
                flushed = size
        flushing.finish()
        os.ftruncate(file.fileno(), size)  # releases blocks that XFS reserves after the end
        os.fsync(file.fileno())
    return content.entry


# the index of the tensor that the bytes belong to, and the bytes, or a function that returns them
NumberedBytes = tuple[int | None, memoryview | Callable[[Sequence[int]], bytes]]


def _blocks(pieces: Sequence[Piece]) -> Iterator[tuple[int | None, Piece, int, int]]:
    """The tensors in blocks of rows, numbered; other pieces unchanged."""
    number = -1
    for piece in pieces:
        if not isinstance(piece, LazyTensor):
            yield None, piece, 0, 0
            continue
        number += 1
        for start, stop in piece.blocks(WRITTEN_BYTES) if piece.nbytes else ():
            yield number, piece, start, stop


def _content(number: int | None, piece: Piece, start: int, stop: int) -> NumberedBytes:
    if not isinstance(piece, LazyTensor):
        return number, piece if callable(piece) else memoryview(piece)
    rows = piece.rows(start, stop)
    assert rows.dtype == piece.dtype.numpy and rows.nbytes * piece.num_rows == piece.nbytes * (stop - start)
    return number, as_bytes(rows)


def check_copy(path: Path, shard: Shard) -> None:
    """Registers the checksums of a copied or cloned file's tensors for comparison with the copy at `path`."""
    for tensor in shard.tensors.values():
        if isinstance(tensor, FileTensor) and tensor.record:
            replace(tensor.record, path=path).was_touched()


def require_unchanged(path: Path, shard: Shard) -> None:
    """Raises MalformedInput if the copy, or the source, of an unchanged file no longer has the planned tensors."""
    assert shard.copy_of
    if not holds(path, shard.tensors):
        problem = f"`{shard.copy_of.name}` changed while it was copied"
        raise MalformedInput(problem, hint="make sure that nothing writes to it, and run again")


@contextmanager
def failing_safely() -> Iterator[None]:
    """Turns an OSError into OutputFailed."""
    try:
        yield
    except LlmconvError:
        raise
    except OSError as error:
        full = "free some space and run again with `--resume`"
        other = "check the permissions of the file and its folder, and run again with `--resume`"
        problem = f"reading or writing failed: {error.strerror or error} ({error.filename or 'output'})"
        raise OutputFailed(problem, hint=full if error.errno in FULL else other) from error


class UnfinishedOutput(Protocol):
    """An output that is being made, with its journal."""

    finished: dict[str, dict[str, Any]]
    """The manifest entries of the files that are complete, by name, those of an earlier run included."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None: ...

    def make_shard(self, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        """Writes one file and returns its manifest entry, which `record` takes once the sources are known to be whole.

        `advance` is called with the number of bytes of each block written.
        """

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Records in the journal that the file `name` is complete."""

    def write_file(self, name: str, content: bytes | Link) -> None:
        """Writes one small file, or a relative symbolic link; where there is no rename, `commit` writes it."""

    def release(self, name: str, sources: Sequence[Path]) -> None:
        """Gives back memory that caches the file `name` and the sources, which will not be read again soon."""
        source_file.forget(sources)

    def leave(self) -> None:
        """Lets other processes go on with the output when this one leaves it."""
        return

    def commit(self, manifest: Manifest) -> None:
        """Adds the manifest of all finished files, and makes the output visible."""


class Destination(Protocol):
    """A folder to make."""

    address: Any  # a path, or the address of a folder in a store or of a repository

    def __str__(self) -> str:
        return str(self.address)

    @property
    def name(self) -> str:
        """Its last part, for messages."""
        return str(self.address.name)

    def is_complete(self) -> bool:
        """Whether llmconv made it, all files have the recorded sizes, and no unfinished run was to replace it."""

    def tidy(self) -> None:
        """Deletes what a run has left that was killed after it had published; the output is complete."""
        return

    def require_free(self, overwrite: bool, inputs: Sequence[Path] = (), *, resume: bool = False) -> None:
        """Requires that it can be made: `overwrite` replaces only what llmconv made; else raises InputRefused.

        With `resume`, it may be complete; the plan is compared with it later. Neither it nor the `inputs` that the run
        reads may be inside the other.
        """

    def require_space(self, plan: Plan) -> None:
        """Requires room for the plan; raises InputRefused."""
        return

    def space_needed(self, plan: Plan) -> int:
        """Bytes of new storage that the plan takes."""
        return plan.nbytes

    def manifest(self) -> Manifest:
        content = self.read(MANIFEST)
        return Manifest() if content is None else parse_manifest(content)

    def read(self, name: str) -> bytes | None:
        """The content of a small file of it, None if there is none."""

    def begin(self, key: str, files: Sequence[str], *, overwrite: bool, resume: bool) -> UnfinishedOutput:
        """Starts or continues the output; raises OutputFailed if another run is writing it, or writing fails.

        `key` is the fingerprint of sources and options, `files` are all names that will be written; `overwrite` allows
        to replace an existing output, `resume` keeps what an interrupted run with the same key finished.
        """

    def require_shared(self) -> None:
        """Raises UnsupportedInput if several processes cannot write it."""
        return

    def share(self, key: str, files: Sequence[str], mine: Collection[str]) -> UnfinishedOutput:
        """Joins the processes with the same key that write the output, none of which commits; it stays unfinished.

        `files` are all of the output, `mine` the shards that this process writes. Raises OutputFailed if a run with
        another key, or one that is about to commit, has the output.
        """

    def finish(self, key: str, files: Sequence[str], *, overwrite: bool, trusted: bool) -> UnfinishedOutput:
        """Starts the last step of what `share` wrote; what this run wrote, if `trusted`, is not read again."""
