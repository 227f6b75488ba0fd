"""Messages and progress bars on stderr: bars only on a terminal, nothing with `-q`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from llmconv.errors import printable

_level = {"quiet": False, "once": False}
_shown: set[str] = set()
"""Warnings that were printed."""


def set_quiet(quiet: bool) -> None:
    """Silences `say` and the progress bars, but not warnings."""
    _level["quiet"] = quiet


def is_quiet() -> bool:
    """Whether `-q` was given."""
    return _level["quiet"]


def say(text: str) -> None:
    """Prints a line on stderr, unless `-q` was given."""
    if not _level["quiet"]:
        _print(text)


def warn(text: str) -> None:
    """Prints a warning on stderr, even with `-q`; see `warn_once`."""
    line = printable(text)
    if not (_level["once"] and line in _shown):
        _shown.add(line)
        _print(f"warning: {line}")


def shown_warnings() -> list[str]:
    """The warnings that this process has printed."""
    return sorted(_shown)


def warn_once(shown: Iterable[str]) -> None:
    """From now on no warning is repeated, nor one of `shown`, which the process that started this one has printed."""
    _level["once"] = True
    _shown.update(shown)


def _print(line: str) -> None:
    if sys.stderr is not None:  # None: closed by the caller; `print` would write to stdout, among the data
        print(line, file=sys.stderr, flush=True)


def warn_all(warnings: Iterable[str]) -> None:
    """Prints several warnings."""
    for text in warnings:
        warn(text)


@contextmanager
def bytes_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar.

    Args:
        title: next to the bar.
        total: in bytes.

    Yields:
        A function that advances the bar by a number of bytes.
    """
    if _level["quiet"] or sys.stderr is None or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich import progress as rich  # noqa: PLC0415 - loading rich takes longer than planning a merge
    from rich.console import Console  # noqa: PLC0415

    columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    text = rich.TextColumn("{task.description}")
    with rich.Progress(text, *columns, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.advance, bar.add_task(title, total=total))
