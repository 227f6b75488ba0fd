"""The folders above an output: every command makes those that are missing, when it begins to write."""

from __future__ import annotations

import os
from pathlib import Path

from llmconv.errors import InputRefused


def require_parents(output: Path) -> None:
    """Requires that the folders above a file or folder to write exist or can be made.

    Raises:
        InputRefused: one of them is a file or a broken link; or `output` is the root of the file system.
    """
    above = next((path for path in output.absolute().parents if os.path.lexists(path)), None)
    if above is None:
        raise InputRefused(f"`{output}` is the root of the file system", hint="choose a path in it")
    if not above.is_dir():
        raise InputRefused(
            f"`{above}` is not a folder, so `{output}` cannot be written", hint="choose a path in another folder"
        )


def make_parents(output: Path) -> None:
    """Makes the missing folders above a file or folder to write.

    Raises:
        OSError: one cannot be made.
    """
    if not output.parent.is_dir():
        output.parent.mkdir(parents=True, exist_ok=True)
