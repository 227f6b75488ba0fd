"""A hostile input: how it is made, and the expected result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        build: makes it in an empty folder and returns the path to convert.
        refused: regular expression for the refusal; None: converted, without any effect.
        options: of the command; a Path, and the names in a list, are of files in the folder.
        command: what converts it: `to-hf`, `from-hf`, `merge-lora` (whose adapter it is), `delta` (whose delta), or
            `extract` (whose tuned model).
    """

    build: Callable[[Path], Path]
    refused: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    command: str = "to-hf"


CANARY = "/tmp/llmconv-canary-that-only-an-executed-payload-makes"
"""Every payload tries to make this file."""
