"""A file that the user names, and names that a file of llmconv's may have."""

from __future__ import annotations

from pathlib import Path

from llmconv.files.safe_folder import Content, Folder, require_plain

NAME_MAX = 255
"""Bytes of a file's name."""


def replace_file(path: Path, content: Content) -> None:
    """Replaces one file that the user named, durably and in one step.

    Args:
        path: of the file; its folder must be there.
        content: of the file.

    Raises:
        InputRefused: it is a link (the user shall name what it leads to), a folder, a pipe or a device.
        OSError: writing failed; what was there is unchanged.
    """
    with Folder.open(path.parent) as folder:
        require_plain(path)
        folder.write_together({path.name: content})


def is_inner(name: str) -> bool:
    """Whether `name` is a file's name, or one in a folder: `a` or `a/b`, and nothing that leads elsewhere."""
    parts = name.split("/")
    is_short = all(len(part.encode("utf-8", "replace")) <= NAME_MAX for part in parts)
    return len(parts) <= 2 and is_short and not {"", ".", ".."} & {*parts} and "\0" not in name
