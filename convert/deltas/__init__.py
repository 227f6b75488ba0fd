"""Deltas: differences between a base and a model tuned from it: exact, arithmetic and low-rank ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmconv.checkpoint import Checkpoint

DELTA_FILE = "delta.json"
"""The file that identifies the folder of an exact delta."""


@dataclass(frozen=True)
class DeltaFormat:
    """The deltas of one training system; `convert/formats/<name>/delta.py` has one as its constant `DELTA`.

    Attributes:
        detect: whether a path is of this format, decided by its content.
        apply: `apply(base, path, dtype)` returns the tuned model in Hugging Face names;
            `dtype` is `keep` or a float type.
    """

    detect: Callable[[Path], bool]
    apply: Callable[[Checkpoint, Path, str], Checkpoint]
