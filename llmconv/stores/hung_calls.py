"""Ends a process some seconds after SIGTERM or Ctrl-C if a store hangs, in whose calls Python raises nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Thread

GRACE = 4.0  # seconds that a call of a store gets to return after a signal: an upload that can be ended is ended sooner
WATCHED = 60.0  # seconds after a signal; a process that still runs then goes on
EXITS = {signal.SIGINT: 130, signal.SIGTERM: 143}  # exit code by signal, as in shells
_cleaning: list[Callable[[], None]] = []


def before_exit(clean: Callable[[], None]) -> None:
    """Registers a function that is called before a process with a hanging store is ended, as `atexit` is not."""
    _cleaning.append(clean)


@cache
def watch(report: Callable[[], None]) -> None:
    """Watches the signals of this process, only in its main thread; calls `report` before the process is ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    Thread(target=_watch, args=(reading, report), name="hung stores", daemon=True).start()


def _watch(reading: int, report: Callable[[], None]) -> None:
    while numbers := os.read(reading, 1):
        if code := EXITS.get(signal.Signals(numbers[0])):
            came = time.monotonic()
            while time.monotonic() < came + WATCHED:
                if is_hanging(came, GRACE):
                    for function in (*_cleaning, report):
                        function()
                    os._exit(code)  # threads that wait for the store would hold up any other exit
                time.sleep(0.1)


_began: dict[object, float] = {}  # when each began, by `time.monotonic`; the calls of all threads


@contextmanager
def call() -> Iterator[None]:
    """The body is a call of a store."""
    mark = object()
    _began[mark] = time.monotonic()
    try:
        yield
    finally:
        del _began[mark]


def is_hanging(since: float, seconds: float) -> bool:
    """Whether a call has not returned for `seconds`; only the time since this moment of `time.monotonic` counts."""
    now = time.monotonic()
    return any(now - max(began, since) > seconds for began in [*_began.values()])
