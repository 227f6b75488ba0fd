"""Sets one key of an existing `llmconv.json`, and leaves everything else in it as it is."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from llmconv.checkpoint import parse_object
from llmconv.errors import InputRefused
from llmconv.files.safe_folder import Folder
from llmconv.output.manifest import MANIFEST
from llmconv.quantized_export import MANIFEST_BYTES

WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
TICK = 1000
"""How much younger the new file is, in ns."""


def record_in_manifest(folder: Path, key: str, value: dict[str, Any]) -> str:
    """Sets `key` in the manifest of `folder`, in one step; a file that already has the value is not written.

    Returns:
        The reason why the manifest is as before, empty if it has the value.
    """
    try:
        with Folder.open(folder) as home:
            return _recorded(home, key, value)
    except OSError as error:
        return error.strerror or str(error)
    except InputRefused as problem:
        return problem.message


def _recorded(home: Folder, key: str, value: dict[str, Any]) -> str:
    found = home.find(MANIFEST)
    if found is None or not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if not found.st_mode & WRITABLE:
        return "it is write-protected"
    old = home.read(MANIFEST, MANIFEST_BYTES)
    if old is None:
        return "it cannot be read"
    new = (json.dumps({**parse_object(old, MANIFEST), key: value}, indent=2) + "\n").encode()
    if len(new) > MANIFEST_BYTES:
        return "it would be too large"
    return "" if new == old else _replaced(home, new, found)


def _replaced(home: Folder, content: bytes, found: os.stat_result) -> str:
    home.sweep()
    with home.begin(MANIFEST) as new:
        new.write(content)
        os.fchmod(new.file.fileno(), stat.S_IMODE(found.st_mode))
        # `--resume` and `push` compare the age of the manifest with that of other files; copying tools see a new file
        os.utime(new.file.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns + TICK))
        new.sync()
        if not _is_unchanged(home.find(MANIFEST), found):
            return "another process changed it meanwhile"
        new.place()
    home.sync()
    return ""


def _is_unchanged(now: os.stat_result | None, before: os.stat_result) -> bool:
    return (
        now is not None
        and os.path.samestat(now, before)
        and (now.st_mtime_ns, now.st_size) == (before.st_mtime_ns, before.st_size)
    )
