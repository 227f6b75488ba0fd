"""Progress and talk on stderr: bars only on a terminal, nothing with `-q`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from llmconv.errors import printable

_level = {"quiet": False}


def set_quiet(quiet: bool) -> None:
    """Silences `say` and the bars (warnings stay)."""
    _level["quiet"] = quiet


def is_quiet() -> bool:
    """Whether `-q` was given."""
    return _level["quiet"]


def say(text: str) -> None:
    """One line of talk on stderr."""
    if not _level["quiet"]:
        _print(text)


def warn(text: str) -> None:
    """One line on stderr that `-q` does not silence."""
    _print(f"warning: {printable(text)}")


def _print(line: str) -> None:
    if sys.stderr is not None:  # or `print` would write to stdout, where the data is
        print(line, file=sys.stderr, flush=True)


def warn_all(warnings: Iterable[str]) -> None:
    """`warn`, for several."""
    for text in warnings:
        warn(text)


@contextmanager
def bytes_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes; yields the function that advances it."""
    if _level["quiet"] or sys.stderr is None or not sys.stderr.isatty():  # None: the caller closed it
        yield lambda count: None
        return
    # by name: most runs have no terminal, and loading rich takes longer than planning a merge
    with importlib.import_module("llmconv.progress_bar").bar(title, total) as advance:
        yield advance
