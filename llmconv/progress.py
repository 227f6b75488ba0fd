"""Messages and progress bars on stderr: bars only on a terminal, nothing with `-q`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from llmconv.errors import printable

_level = {"quiet": False}
_shown: list[str] = []  # the line that the next one replaces, if there is one
CLEAR = "\r\x1b[K"  # removes the last line of a terminal
# functions that take warnings, the last of them all; without one they are printed
_takers: list[Callable[[str], object]] = []


def set_quiet(quiet: bool) -> None:
    """Silences `say` and the progress bars, but not warnings."""
    _level["quiet"] = quiet


def is_quiet() -> bool:
    """Whether `-q` was given."""
    return _level["quiet"]


def status(text: str) -> None:
    """Shows what is done in a line of a terminal's stderr, replaced by the next; none with `-q`, or for empty text."""
    if (text or _shown) and _is_shown():
        width = shutil.get_terminal_size().columns - 1
        _shown[:] = [text] if text else []
        print(f"{CLEAR}{printable(text)[:width]}", end="", file=sys.stderr, flush=True)


def _is_shown() -> bool:
    """Whether lines that are replaced, and bars, are for anybody."""
    return not _level["quiet"] and sys.stderr is not None and sys.stderr.isatty()


def say(text: str) -> None:
    """Prints a line on stderr, unless `-q` was given."""
    if not _level["quiet"]:
        _print(text)


def warn(text: str) -> None:
    """Prints a warning on stderr, even with `-q`."""
    if _takers:
        _takers[-1](text)
    else:
        _print(f"warning: {printable(text)}")


@contextmanager
def warnings_to(take: Callable[[str], object]) -> Iterator[None]:
    """Gives the warnings of this process to a function instead of printing them."""
    _takers.append(take)
    try:
        yield
    finally:
        _takers.remove(take)


def _print(line: str) -> None:
    if sys.stderr is None:  # closed by the caller; `print` would write to stdout, among the data
        return
    shown = "".join(_shown)
    status("")
    print(line, file=sys.stderr, flush=True)
    if shown:
        status(shown)


def warn_all(warnings: Iterable[str]) -> None:
    for text in warnings:
        warn(text)


@contextmanager
def bytes_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar of `total` bytes; yields a function that advances it by a number of bytes."""
    if not _is_shown():
        yield lambda count: None
        return
    status("")
    from rich import progress as rich  # noqa: PLC0415 - loading rich takes longer than planning a merge
    from rich.console import Console  # noqa: PLC0415

    columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    text = rich.TextColumn("{task.description}")
    with rich.Progress(text, *columns, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.advance, bar.add_task(title, total=total))


@contextmanager
def step(name: str) -> Iterator[None]:
    """Shows what runs for seconds, such as `loading torch`, in the last line of a terminal; removes it at the end."""
    outer = "".join(_shown)
    status(f"{name} …")
    try:
        yield
    finally:
        status(outer)
