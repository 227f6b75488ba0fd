"""Deltas: differences between a base and a model tuned from it: exact, arithmetic and low-rank ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmconv.checkpoint import Checkpoint
from llmconv.convert.deltas.arithmetic import WrittenDelta
from llmconv.errors import MalformedInput
from llmconv.output.manifest import read_manifest

DELTA_FILE = "delta.json"  # the file that identifies the folder of an exact delta


def is_recorded_delta(folder: Path) -> bool:
    """Whether llmconv wrote `folder` as another tool's delta, which has the files of a model."""
    try:
        steps = read_manifest(folder).steps if folder.is_dir() else []
    except MalformedInput:
        return False
    options = steps[-1].get("options") if steps and steps[-1].get("command") == "delta-extract" else None
    return isinstance(options, dict) and "to" in options


@dataclass(frozen=True)
class DeltaFormat:
    """The deltas of one training system; `convert/formats/<name>/delta.py` has one as its constant `DELTA`."""

    detect: Callable[[Path], bool]  # whether a path is of this format, decided by its content
    # `apply(base, path, dtype)` returns the tuned model in Hugging Face names; `dtype` is `keep` or a float type
    apply: Callable[[Checkpoint, Path, str], Checkpoint]
    # `save(base, tuned, shards)` returns the files of a delta, in this number of shards or (with None) in as many as
    # the base has. None if the system's deltas cannot be written
    save: Callable[[Checkpoint, Checkpoint, int | None], WrittenDelta] | None = None
