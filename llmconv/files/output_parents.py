"""The folders above an output: every command makes those that are missing, when it begins to write."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from llmconv.errors import InputRefused
from llmconv.progress import say


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


@contextmanager
def parents_made(output: Path) -> Iterator[None]:
    """The missing folders above a file or folder to write; those that were made are reported at the end.

    If what is done with them fails, they are removed again, unless something is in them.

    Args:
        output: file or folder.

    Raises:
        OSError: one cannot be made.
    """
    made: list[Path] = []
    try:
        for folder in reversed([path for path in output.parents if not path.is_dir()]):
            try:
                folder.mkdir()
                made.append(folder)
            except FileExistsError:  # another process made it, or it is `a/..`
                if not folder.is_dir():
                    raise
        yield
    except BaseException:
        _remove_empty(made)
        raise
    if made:
        say(f"made `{made[-1]}`")


@contextmanager
def folder_made(folder: Path) -> Iterator[None]:
    """A folder for several files, and the missing ones above it, as `parents_made`; the folder itself is not reported.

    Args:
        folder: it may exist.

    Raises:
        OSError: it cannot be made.
    """
    with parents_made(folder):
        made = [] if folder.is_dir() else [folder]
        folder.mkdir(exist_ok=True)
        try:
            yield
        except BaseException:
            _remove_empty(made)
            raise


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in reversed(folders):
        with suppress(OSError):  # something is in it
            folder.rmdir()
