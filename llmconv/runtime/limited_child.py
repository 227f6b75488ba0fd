"""Work on untrusted input in a forked child process, with limited time and memory: chat templates, and grammars."""

from __future__ import annotations

import os
import resource
import selectors
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from llmconv.errors import first_line

# CPU seconds, bytes beyond the memory of the process, and bytes of text: a thousand times what a template needs
SECONDS, MEMORY, CHARACTERS = 5, 512 << 20, 16 << 20
WAIT = 60.0  # wall-clock seconds, for a child that gets little CPU time
SUCCEEDED, FAILED = b"+", b"-"


class TooCostly(Exception):
    """The work took more than the limits."""


def bounded_text(make: Callable[[], str]) -> str:
    """The text of `make` in a forked child (no threads); TooCostly if it exceeds a limit or crashes, ValueError."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child never uses
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
    if answer[:1] != SUCCEEDED:
        raise TooCostly
    return answer[1:].decode("utf-8", "surrogatepass")


def _make(make: Callable[[], str], writer: int) -> NoReturn:
    """The child process: writes the text, or nothing if a limit stopped it; runs none of the parent's exit handlers."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        with suppress(OSError, ValueError):
            with open("/proc/self/statm", "rb") as file:
                now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            wanted = now + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (wanted if most < 0 else min(wanted, most), most))
        try:
            answer = SUCCEEDED + make().encode("utf-8", "surrogatepass")
        except MemoryError:
            answer = b""
        except Exception as error:  # it can raise anything
            answer = FAILED + first_line(error).encode("utf-8", "replace")
        os.set_blocking(writer, True)
        for start in range(0, len(answer), 1 << 16):
            os.write(writer, answer[start : start + (1 << 16)])
    finally:
        os._exit(0)


def _read(reader: int) -> bytes:
    """The output of the child; empty if it is too large or too late."""
    parts: list[bytes] = []
    size, end = 0, time.monotonic() + WAIT
    with selectors.DefaultSelector() as waiting:  # `select.select` refuses descriptors from 1024 on, which a server has
        waiting.register(reader, selectors.EVENT_READ)
        while waiting.select(max(0.0, end - time.monotonic())):
            if not (part := os.read(reader, 1 << 20)):
                return b"".join(parts)
            parts.append(part)
            size += len(part)
            if size > CHARACTERS:
                break
    return b""
