"""Replacing a file that the user named, and the rule for names of files in a folder."""

from __future__ import annotations

from pathlib import Path

from llmconv.files.output_parents import parents_made
from llmconv.files.safe_folder import Folder, WritableContent, require_plain

NAME_MAX = 255
"""Maximum bytes of a file's name."""


def replace_file(path: Path, content: WritableContent) -> None:
    """Replaces one file that the user named, durably and in one step.

    Args:
        path: of the file; missing folders above it are made.
        content: of the file.

    Raises:
        InputRefused: it is a link, a folder, a pipe or a device.
        OSError: writing failed; the old file is unchanged.
    """
    with parents_made(path), Folder.open(path.parent) as folder:
        require_plain(path)
        folder.write_together({path.name: content})


def is_inner(name: str) -> bool:
    """Whether `name` is `a` or `a/b`, without parts such as `..` that lead elsewhere."""
    parts = name.split("/")
    is_short = all(len(part.encode("utf-8", "replace")) <= NAME_MAX for part in parts)
    return len(parts) <= 2 and is_short and not {"", ".", ".."} & {*parts} and "\0" not in name
