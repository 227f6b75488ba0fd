"""Outputs of a few shards, written by the library without a command; the process that is killed in the middle of one.

python -m tests.builders.shard_outputs OUT [overwrite]        writes `large()`
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.files.paths import output_place
from llmconv.output.plan import plan_checkpoint
from llmconv.output.work import Finish, Part, Work
from llmconv.output.writer import check_output, write_checkpoint
from llmconv.tensors import BY_NAME, LazyTensor, in_memory

F32 = BY_NAME["float32"]

LARGE = {"t0": 17 << 18, "t1": 9 << 18, "t2": 20}
"""Numbers in each shard of `large`: three parts of an upload, two, and less than one."""


def sample(broken: Exception | None = None, **config: Any) -> Checkpoint:
    """Three shards of 80 bytes; with `broken` the last one cannot be read."""

    def fail(start: int, stop: int) -> Any:
        assert broken
        raise broken

    rows = [np.arange(20, dtype=np.float32).reshape(10, 2) + number for number in range(3)]
    tensors = {f"t{number}": in_memory(array, F32) for number, array in enumerate(rows)}
    if broken:
        tensors["t2"] = LazyTensor(F32, (10, 2), fail)
    return _checkpoint(tensors, config)


def large(read: list[str] | None = None) -> Checkpoint:
    """Three shards, two of them uploaded in parts; `read` gets the name of each tensor that is read."""

    def tensor(name: str, count: int) -> LazyTensor:
        def rows(start: int, stop: int) -> Any:
            if read is not None:
                read.append(name)
            return np.arange(start, stop, dtype=np.float32) + len(name) * count

        return LazyTensor(F32, (count,), rows)

    return _checkpoint({name: tensor(name, count) for name, count in LARGE.items()}, {})


def five() -> Checkpoint:
    """Five small shards, and another small file: what `--overwrite` replaces."""
    tensors = {f"t{number}": in_memory(np.full((10, 2), number, np.float32), F32) for number in range(5)}
    return _checkpoint(tensors, {"old": 1}, {"vocab.json": b"[]"})


def _checkpoint(
    tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], files: Mapping[str, bytes] | None = None
) -> Checkpoint:
    side_files = {"tokenizer.json": b"{}", **(files or {})}
    return Checkpoint(Path("sample"), "test", tensors, {"model_type": "llama", **config}, side_files)


def write(
    checkpoint: Checkpoint,
    output: Any,
    *,
    overwrite: bool = False,
    resume: bool = False,
    work: Work | None = None,
    sources: Sequence[Path] = (),
) -> None:
    """Writes it with one tensor in each shard."""
    plan, place = plan_checkpoint(checkpoint, 80), output_place(output)
    check_output(plan, place, overwrite, [], resume=resume)
    steps = [{"command": "test", "options": checkpoint.config}]
    write_checkpoint(plan, place, steps=steps, sources=sources, overwrite=overwrite, resume=resume, work=work)


def written(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


WORK: dict[str, Work] = {"part": Part(0, 2), "finish": Finish()}

if __name__ == "__main__":
    asked = sys.argv[2] if len(sys.argv) > 2 else ""
    write(large(), sys.argv[1], overwrite=asked == "overwrite", work=WORK.get(asked))
