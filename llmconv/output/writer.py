"""Writes a planned Checkpoint as a folder: shards, small files, manifest.

No tensor is read before every name, shape and dtype is known and the free space was checked.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, MalformedInput
from llmconv.files import page_cache
from llmconv.files.checksums import checked_reading
from llmconv.files.copying import can_clone, copy_file
from llmconv.files.safe_folder import Link, NewFile
from llmconv.files.safetensors_file import FileTensor, holds
from llmconv.output.manifest import MANIFEST, Manifest, file_entry, read_manifest
from llmconv.output.plan import Plan, Shard
from llmconv.output.staging import StagedFolder, bytes_held, failing_safely, is_complete, require_free
from llmconv.output.streaming import stream_shard
from llmconv.progress import bytes_bar, say, warn_all

CONFIG = "config.json"
UNCHECKED = "`{}` was saved without checksums, so damage to it cannot be detected"

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
HEAP_BYTES = 256 << 20
"""Freed memory that glibc may keep (`mallopt(3)`); a block is far smaller."""


def write_checkpoint(
    plan: Plan,
    output: Path,
    *,
    steps: Sequence[dict[str, Any]],
    sources: Sequence[Path],
    overwrite: bool = False,
    resume: bool = False,
    more_files: Mapping[str, bytes | Link] | None = None,
    graphs: dict[str, dict[str, Any]] | None = None,
) -> Manifest:
    """Writes the folder `output`, for which `check_output` was called: shards, small files, manifest, in that order.

    Args:
        plan: from `plan_checkpoint`, or from a format's `save`.
        output: the folder to make.
        steps: provenance for the manifest, oldest first.
        sources: files that the tensors are read from; `resume` compares their size and time.
        overwrite: replace an existing folder.
        resume: continue an interrupted run.
        more_files: content of more files by path, such as graphs; they replace those of the plan.
        graphs: the manifest's entries of these graphs.

    Raises:
        InputRefused: a source is damaged (MalformedInput), or `output` appeared. With `resume` an `output` that is
            complete and of the same inputs and options is kept, and nothing is written.
        OutputFailed: writing failed.
    """
    if resume and not overwrite and is_complete(output):
        return _same_as_before(plan, output, steps, sources, adds=bool(more_files))
    _reuse_freed_blocks()
    with StagedFolder(output, key=_fingerprint(plan, steps, sources), overwrite=overwrite, resume=resume) as folder:
        _write_shards(plan, folder, output.name, sources)
        for name, content in (*plan.small_files.items(), *(more_files or {}).items()):
            folder.write_file(name, content)
        manifest = Manifest(list(steps), graphs=graphs or {})
        folder.commit(manifest)
    return manifest


def _write_shards(plan: Plan, folder: StagedFolder, name: str, sources: Sequence[Path]) -> None:
    """Writes the unfinished shards; `name` is the title of the progress bar."""
    crowded = not page_cache.fits(plan.nbytes)
    with bytes_bar(f"writing {name}", plan.nbytes) as advance, checked_reading() as checks:
        for shard in plan.shards:
            if shard.name in folder.finished:
                advance(shard.nbytes)
                continue
            entry = _make_shard(folder, shard, advance)
            checks.finish()
            folder.record(shard.name, entry)
            if crowded:
                page_cache.forget([folder.path / shard.name, *sources])
    warn_all(UNCHECKED.format(name) for name in sorted(checks.unchecked))


def _same_as_before(
    plan: Plan, output: Path, steps: Sequence[dict[str, Any]], sources: Sequence[Path], *, adds: bool
) -> Manifest:
    """The manifest of a complete folder, if this run would make the same one."""
    manifest = read_manifest(output)
    made = (output / MANIFEST).stat().st_mtime_ns
    changed = [source.name for source in sources if source.stat().st_mtime_ns > made]
    replaced = {CONFIG} if adds and _extends(output / CONFIG, plan.small_files[CONFIG]) else set()
    small = {name: file_entry(content) for name, content in plan.small_files.items() if name not in replaced}
    same = manifest.steps == json.loads(json.dumps(list(steps))) and small.items() <= manifest.files.items()
    if changed or not same or not {shard.name for shard in plan.shards} <= manifest.files.keys():
        why = f"`{changed[0]}` has changed since" if changed else "it was made from another input or with other options"
        if not changed and manifest.steps[: len(steps)] == json.loads(json.dumps(list(steps))) != manifest.steps:
            why = f"`{manifest.steps[-1].get('command')}` has changed it since"
        raise InputRefused(
            f"`{output}` is complete, but {why}", hint="choose another `-o`, or give `--overwrite` to make it again"
        )
    say(f"`{output}` is complete: nothing to resume")
    return replace(manifest, found=True)


def _extends(path: Path, content: bytes) -> bool:
    """Whether a JSON file has all fields of `content` with the same values; exported graphs may add some."""
    made = read_json(path) if path.is_file() else {}
    return all(name in made and made[name] == value for name, value in json.loads(content).items())


def check_output(plan: Plan, output: Path, overwrite: bool, inputs: Sequence[Path], *, resume: bool = False) -> None:
    """Checks before a run that its output can be written.

    Args:
        plan: of the run.
        output: the folder to make.
        overwrite: it may be replaced.
        inputs: paths that the run reads.
        resume: it may be complete already.

    Raises:
        InputRefused: `output` exists and may not be replaced, lies in an input, or no space is left.
    """
    require_free(output, overwrite, inputs, resume=resume)
    if resume and not overwrite and is_complete(output):
        return
    require_space(output, space_needed(plan, output) - bytes_held(output))


def _home(output: Path) -> Path:
    """The nearest existing folder above `output`."""
    return next(folder for folder in output.absolute().parents if folder.is_dir())


def space_needed(plan: Plan, output: Path) -> int:
    """Bytes that the plan needs on the disk of `output`; clones need none."""
    source = next((shard.copy_of for shard in plan.shards if shard.copy_of), None)
    if source and can_clone(source, _home(output)):
        return sum(shard.nbytes for shard in plan.shards if not shard.copy_of)
    return plan.nbytes


def _reuse_freed_blocks() -> None:
    """Makes glibc reuse freed row blocks: new pages for each cost a tenth of a run (measured)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, HEAP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, HEAP_BYTES)


def _make_shard(folder: StagedFolder, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
    """Copies or streams one file and returns its manifest entry."""
    with failing_safely(), folder.new_file(shard.name) as new:
        entry = _copy_shard(new, shard, advance) if shard.copy_of else stream_shard(new.file, shard, advance)
        new.place()
    if shard.copy_of:
        _check_copy(folder.path / shard.name, shard)
    return entry


def _check_copy(path: Path, shard: Shard) -> None:
    """Registers the checksums of a copied or cloned file's tensors for comparison with the copy."""
    for tensor in shard.tensors.values():
        if isinstance(tensor, FileTensor) and tensor.record:
            replace(tensor.record, path=path).was_touched()


def _copy_shard(new: NewFile, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
    assert shard.copy_of
    entry = copy_file(shard.copy_of, new.file, advance)
    if not holds(new.path, shard.tensors):
        raise MalformedInput(
            f"`{shard.copy_of.name}` changed while it was copied",
            hint="make sure that nothing writes to it, and run again",
        )
    return entry


def require_space(output: Path, needed: int, home: Path | None = None) -> None:
    """Requires free space on the disk.

    Args:
        output: the folder to write.
        needed: bytes.
        home: an existing folder on the disk of `output` (default: the nearest above it).

    Raises:
        InputRefused: fewer than `needed` bytes are free.
    """
    free = shutil.disk_usage(home or _home(output)).free
    if needed > free:
        raise InputRefused(
            f"no space left: `{output}` needs {needed:,} bytes, {free:,} are free",
            hint="free some space, or choose an output on another disk",
        )


def _fingerprint(plan: Plan, steps: Sequence[dict[str, Any]], sources: Sequence[Path]) -> str:
    """A hash of everything that determines the output's bytes."""
    layout = [[(name, t.dtype.name, t.shape) for name, t in shard.tensors.items()] for shard in plan.shards]
    stats = [(source.name, source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    return hashlib.sha256(json.dumps([list(steps), layout, stats]).encode()).hexdigest()
