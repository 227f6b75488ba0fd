"""The folder of a report: whether it can be written is known before the work that it reports."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile

from llmconv.errors import InputRefused, OutputFailed
from llmconv.files.output_parents import require_parents
from llmconv.files.safe_folder import Folder

PROBE = 4 << 20
"""Bytes of free space that a report must have; the reports of the largest models are almost as large."""

HINT = "give another folder to `--report`"


def require_writable(folder: Path, names: Iterable[str]) -> None:
    """Checks before a run whether its report can be written, and removes an older report.

    Otherwise a run that fails before it writes its report would leave the report of another run.

    Args:
        folder: for the report; it may be missing.
        names: of the report's files.

    Raises:
        InputRefused: the folder, or one above it, is a file, or a name in it is neither a file nor a link.
        OutputFailed: the folder is not writable, or the disk is full.
    """
    require_parents(folder)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise InputRefused(f"`{folder}` is not a folder, so no report can be written there", hint=HINT)
    try:
        with TemporaryFile(dir=existing) as file:
            file.write(b"\0" * PROBE)
            file.flush()
    except OSError as error:
        raise unwritable(folder, error) from error
    if existing == folder.absolute():
        with Folder.open(folder) as home:
            found = [*names]
            for name in found:
                home.require_replaceable(name)
            for name in filter(home.find, found):
                home.remove(name)


def unwritable(folder: Path, error: OSError) -> OutputFailed:
    """The error of a report that could not be written."""
    return OutputFailed(f"cannot write the report to `{folder}`: {error.strerror}", hint=HINT)
