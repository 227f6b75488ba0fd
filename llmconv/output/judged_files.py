"""What identifies the files that a verdict is about: sha256 of graphs, size and header of weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.files.safetensors_file import HEADER_LIMIT
from llmconv.files.source_file import open_source


@dataclass(frozen=True)
class WeightFile:
    """What identifies a safetensors file without its data.

    Attributes:
        bytes: size of the file.
        header_sha256: sha256 of the 8 bytes of the header's length and of the header.
        sha256: of the whole file; empty if it was not computed.
    """

    bytes: int
    header_sha256: str
    sha256: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The entry in the manifest."""
        whole = {"sha256": self.sha256} if self.sha256 else {}
        return {"bytes": self.bytes, "header_sha256": self.header_sha256, **whole}


def graph_sha256(path: Path) -> str:
    """The sha256 of a file; empty if it is not a regular file, or cannot be read."""
    try:
        if not path.is_file():
            return ""
        with open_source(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def weight_file(path: Path, sha256: str = "") -> WeightFile | None:
    """Size and header of a safetensors file; None if it has none, or cannot be read.

    Args:
        path: of the file.
        sha256: of the whole file, if it is known.
    """
    try:
        if not path.is_file():
            return None
        size = path.stat().st_size
        with open_source(path) as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(HEADER_LIMIT, size - 8):
                return None
            return WeightFile(size, hashlib.sha256(prefix + file.read(length)).hexdigest(), sha256)
    except OSError:
        return None
