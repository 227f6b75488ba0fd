"""A hostile input: how it is made, and what has to become of it."""

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
        refused: what the refusal of `to-hf` says (a regular expression); None: converted, without any effect.
        options: of `to_hf`; names of files in the folder are made paths.
    """

    build: Callable[[Path], Path]
    refused: str | None
    options: Mapping[str, Any] = field(default_factory=dict)


CANARY = "/tmp/llmconv-canary-that-only-an-executed-payload-makes"
"""Every payload tries to make this file."""
