"""Deltas: differences between a base and a model tuned from it: exact, arithmetic and low-rank ones."""

from __future__ import annotations

from pathlib import Path

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
