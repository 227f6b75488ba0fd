"""Progress and talk on stderr: bars only on a terminal, nothing with `-q`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from llmconv.errors import printable

_level = {"quiet": False}


def set_quiet(quiet: bool) -> None:
    """Silences `say` and the bars (warnings stay)."""
    _level["quiet"] = quiet


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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
