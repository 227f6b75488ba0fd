"""Writing a Checkpoint as a folder, Hugging Face's unless the plan says otherwise: each file a stream of pieces.

Reading, arithmetic, hashing and writing overlap: a bounded queue of row blocks, so memory follows the block size and
not the model. Nothing is read before every name, shape and dtype is known and the disk is known to be large enough.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmconv.crc import checked_reading
from llmconv.errors import InputRefused, MalformedInput
from llmconv.file_copy import can_clone, copy_file
from llmconv.manifest import Manifest
from llmconv.plan import Plan, Shard
from llmconv.progress import bytes_bar, warn_all
from llmconv.safetensors_io import FileTensor, holds
from llmconv.staging import StagedFolder, failing_safely, require_free
from llmconv.tensors import Array, LazyTensor, Piece

LOOK_AHEAD = 8
"""Row blocks in flight: enough for the cores, few enough to stay small."""

FLUSH_BYTES = 32 << 20
"""The disk starts on what is written after so many bytes, so that the last fsync has little left to wait for."""

WRITE_BYTES = 256 << 10
"""Bytes per system call: with 4 MB the kernel makes huge pages for the cache, which takes three times as long."""

UNCHECKED = "`{}` was saved without checksums, so damage to it would not be noticed"

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
HEAP_BYTES = 256 << 20
"""What glibc may keep of freed blocks (`mallopt(3)`); a block is far smaller."""


def write_checkpoint(
    plan: Plan,
    output: Path,
    *,
    steps: Sequence[dict[str, Any]],
    sources: Sequence[Path],
    overwrite: bool = False,
    resume: bool = False,
    finish: Callable[[StagedFolder, Manifest], None] | None = None,
) -> Manifest:
    """Writes the folder `output`: shards, small files, manifest, in that order.

    Args:
        plan: from `plan_checkpoint`, or from a format's `save`.
        output: the folder to make.
        steps: provenance for the manifest, oldest first.
        sources: files that were read; their size and time guard `--resume`.
        overwrite: replace an existing folder.
        resume: continue an interrupted run.
        finish: adds more files before the folder becomes visible.

    Raises:
        InputRefused: `output` exists, the disk is too small, or a source is damaged (MalformedInput).
        OutputFailed: writing failed.
    """
    _reuse_freed_blocks()
    with StagedFolder(output, key=_fingerprint(plan, steps, sources), overwrite=overwrite, resume=resume) as folder:
        done = sum(entry["bytes"] for entry in folder.finished.values())
        _require_space(output, space_needed(plan, output) - done)
        with bytes_bar(f"writing {output.name}", plan.nbytes) as advance, checked_reading() as checks:
            for shard in plan.shards:
                if shard.name in folder.finished:
                    advance(shard.nbytes)
                else:
                    entry = _make_shard(folder.place(shard.name), shard, advance)
                    checks.finish()
                    folder.record(shard.name, entry)
        warn_all(UNCHECKED.format(name) for name in sorted(checks.unchecked))
        for name, content in plan.small_files.items():
            folder.write_file(name, content)
        manifest = Manifest(list(steps))
        if finish:
            finish(folder, manifest)
        folder.commit(manifest)
    return manifest


def check_output(plan: Plan, output: Path, overwrite: bool, inputs: Sequence[Path]) -> None:
    """Refuses before anything is begun what would fail at the end.

    Args:
        plan: of the run.
        output: the folder to make.
        overwrite: it may be replaced.
        inputs: what the run reads.

    Raises:
        InputRefused: `output` is there and may not be replaced, lies in an input, or the disk is too small.
    """
    require_free(output, overwrite, inputs)
    _require_space(output, space_needed(plan, output))


def _home(output: Path) -> Path:
    """The folder, there already, in which `output` is to be made."""
    return next(folder for folder in output.absolute().parents if folder.is_dir())


def space_needed(plan: Plan, output: Path) -> int:
    """Bytes that the plan takes on the disk of `output`; clones take none."""
    source = next((shard.copy_of for shard in plan.shards if shard.copy_of), None)
    if source and can_clone(source, _home(output)):
        return sum(shard.nbytes for shard in plan.shards if not shard.copy_of)
    return plan.nbytes


def _reuse_freed_blocks() -> None:
    """Has glibc keep freed row blocks for the next ones: fresh pages for each cost a tenth of a run (measured)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, HEAP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, HEAP_BYTES)


@dataclass
class _Sums:
    """The sha256 of all bytes that passed, and the CRC-32 of each tensor's, unless `crcs` is empty."""

    crcs: list[int]
    sha256: Any = field(default_factory=hashlib.sha256)

    def add(self, number: int | None, block: memoryview) -> None:
        """Takes the next bytes, which belong to tensor `number` if to any."""
        self.sha256.update(block)
        if number is not None and self.crcs:
            self.crcs[number] = zlib.crc32(block, self.crcs[number])


def _make_shard(path: Path, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
    """Copies or streams one file and returns its manifest entry."""
    part = path.with_name(path.name + ".part")
    with failing_safely():
        entry = (_copy_shard if shard.copy_of else _write_shard)(part, shard, advance)
        part.replace(path)
    if shard.copy_of:
        _check_copy(path, shard)
    return entry


def _check_copy(path: Path, shard: Shard) -> None:
    """Has the checksums of a copied file's tensors compared with what the copy holds, a clone's too."""
    for tensor in shard.tensors.values():
        if isinstance(tensor, FileTensor) and tensor.record:
            replace(tensor.record, path=path).was_touched()


def _copy_shard(part: Path, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
    assert shard.copy_of
    entry = copy_file(shard.copy_of, part, advance)
    if not holds(part, shard.tensors):
        raise MalformedInput(f"`{shard.copy_of.name}` changed while it was copied", hint="let nobody write to it")
    return entry


def _write_shard(part: Path, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
    pieces = list(shard.container(shard.tensors))
    sums = _Sums([0] * len(shard.tensors) if any(callable(piece) for piece in pieces) else [])
    size = flushed = 0
    with open(part, "wb", buffering=0) as file, ThreadPoolExecutor(2) as helpers:
        hashing: Future[None] = helpers.submit(lambda: None)
        flushing = hashing
        for number, content in _contents(pieces):
            hashing.result()
            block = memoryview(content(sums.crcs)) if callable(content) else content
            hashing = helpers.submit(sums.add, number, block)
            write_fully(file.fileno(), block)
            advance(len(block))
            size += len(block)
            if size - flushed > FLUSH_BYTES and flushing.done():
                flushing.result()
                flushing, flushed = helpers.submit(os.fdatasync, file.fileno()), size
        hashing.result()
        flushing.result()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": sums.sha256.hexdigest()}


Content = tuple[int | None, memoryview | Callable[[Sequence[int]], bytes]]
"""The number of the tensor that the bytes belong to, and the bytes, or what gives them."""


def _contents(pieces: Sequence[Piece]) -> Iterator[Content]:
    """The bytes of a file in order; those of tensors computed ahead of the writer."""
    with ThreadPoolExecutor(os.cpu_count()) as readers:
        pending: deque[tuple[int | None, Future[Array] | Piece]] = deque()
        try:
            for number, piece, start, stop in _blocks(pieces):
                if isinstance(piece, LazyTensor):
                    read = readers.submit(copy_context().run, _checked_rows, piece, start, stop)
                    pending.append((number, read))
                else:
                    pending.append((number, piece))
                if len(pending) > LOOK_AHEAD:
                    yield _arrived(*pending.popleft())
            while pending:
                yield _arrived(*pending.popleft())
        finally:
            for _, waiting in pending:
                if isinstance(waiting, Future):
                    waiting.cancel()


def _blocks(pieces: Sequence[Piece]) -> Iterator[tuple[int | None, Piece, int, int]]:
    """The tensors by blocks of rows, numbered; the other pieces as they are."""
    number = -1
    for piece in pieces:
        if not isinstance(piece, LazyTensor):
            yield None, piece, 0, 0
            continue
        number += 1
        for start, stop in piece.blocks() if piece.nbytes else ():
            yield number, piece, start, stop


def _arrived(number: int | None, later: Future[Array] | Piece) -> Content:
    if isinstance(later, Future):
        return number, as_bytes(later.result())
    assert not isinstance(later, LazyTensor)
    return number, later if callable(later) else memoryview(later)


def _checked_rows(tensor: LazyTensor, start: int, stop: int) -> Array:
    rows = tensor.rows(start, stop)
    assert rows.dtype == tensor.dtype.numpy and rows.nbytes * tensor.num_rows == tensor.nbytes * (stop - start)
    return rows


def as_bytes(array: Array) -> memoryview:
    """The array's memory, row-major, as bytes."""
    return array.reshape(-1).view("u1").data


def write_fully(fd: int, block: memoryview) -> None:
    """Writes all of `block`, whatever the short writes."""
    while block:
        block = block[os.write(fd, block[:WRITE_BYTES]) :]


def _require_space(output: Path, needed: int) -> None:
    free = shutil.disk_usage(_home(output)).free
    if needed > free:
        raise InputRefused(
            f"no space left: `{output}` needs {needed:,} bytes, {free:,} are free",
            hint="free some space, or choose an output on another disk",
        )


def _fingerprint(plan: Plan, steps: Sequence[dict[str, Any]], sources: Sequence[Path]) -> str:
    """Changes whenever the output's bytes could change."""
    layout = [[(name, t.dtype.name, t.shape) for name, t in shard.tensors.items()] for shard in plan.shards]
    stats = [(source.name, source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    return hashlib.sha256(json.dumps([list(steps), layout, stats]).encode()).hexdigest()
