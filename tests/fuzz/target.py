"""Target: a parser that is fuzzed, the honest inputs that it starts from, and files next to its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from llmconv.files.sources import reading_safely

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        name: of the file that changes.
        seeds: honest contents of it.
        read: reads it, given its path.
        siblings: the other files of its folder, by name.
        words: pieces that mean something in the format.
        refused: more contents to start from, which are not honest.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    read: Callable[[Path], object]
    siblings: Callable[[], Files] = dict
    words: tuple[bytes, ...] = ()
    refused: Callable[[], list[bytes]] = list


def built(build: Callable[[Path], Path], name: str) -> bytes:
    """The content of a file that a builder of honest inputs makes."""
    return _files(build)[name]


@lru_cache
def _files(build: Callable[[Path], Path]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        place = build(Path(folder))
        root = place if place.is_dir() else place.parent
        return {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()}


def others(build: Callable[[Path], Path], name: str) -> Files:
    """The other files of its folder."""
    return {other: content for other, content in _files(build).items() if other != name}


def run_target(target: Target, data: bytes, folder: Path) -> None:
    """Reads `data` in the place of the target's file.

    Raises:
        LlmconvError: it is refused; anything else is a fault.
    """
    path = folder / target.name
    path.write_bytes(data)
    with reading_safely(path):
        target.read(path)
