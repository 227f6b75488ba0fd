"""A text that a program from a model folder makes: made in a child process of bounded time and memory.

transformers renders chat templates in a sandbox that keeps a template from the disk and the network, but not from
loops without end or texts of gigabytes.
"""

from __future__ import annotations

import os
import resource
import select
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from llmconv.errors import first_line

SECONDS, MEMORY, CHARACTERS = 5, 512 << 20, 16 << 20
"""CPU seconds, bytes beyond what the process has, and bytes of the text: a thousand times what templates need."""

WAIT = 60.0
"""Seconds of the clock, for a child that gets no processor."""

MADE, FAILED = b"+", b"-"


class Unbounded(Exception):
    """The program took too long, or more memory than it may have."""


def bounded_text(make: Callable[[], str]) -> str:
    """The text that `make` returns, made in a forked child.

    Args:
        make: pure Python; it must not use threads or locks of this process.

    Raises:
        Unbounded: it took too long, or too much memory.
        ValueError: it failed; says with what.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which the child never uses
        child = os.fork()
    if child == 0:
        os.close(reader)
        _make(make, writer)
    os.close(writer)
    try:
        answer = _read(reader)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(child, 9)
        os.waitpid(child, 0)
    if answer[:1] == FAILED:
        raise ValueError(answer[1:].decode("utf-8", "replace"))
    if answer[:1] != MADE:
        raise Unbounded
    return answer[1:].decode("utf-8", "surrogatepass")


def _make(make: Callable[[], str], writer: int) -> NoReturn:
    """The child: writes what it made, or nothing where it was stopped; runs no handler of the parent's."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        _limit_memory()
        try:
            answer = MADE + make().encode("utf-8", "surrogatepass")
        except MemoryError:
            answer = b""
        except Exception as error:  # a template is a program: it fails in every way
            answer = FAILED + first_line(error).encode("utf-8", "replace")
        os.set_blocking(writer, True)
        for start in range(0, len(answer), 1 << 16):
            os.write(writer, answer[start : start + (1 << 16)])
    finally:
        os._exit(0)


def _limit_memory() -> None:
    """No more addresses than there are now and `MEMORY`; where nothing tells how many there are, time alone counts."""
    with suppress(OSError, ValueError):
        with open("/proc/self/statm", "rb") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = now + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (wanted if most < 0 else min(wanted, most), most))


def _read(reader: int) -> bytes:
    """What the child wrote; empty where it wrote too much or too late."""
    parts: list[bytes] = []
    size, end = 0, time.monotonic() + WAIT
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(reader, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > CHARACTERS:
            break
    return b""
