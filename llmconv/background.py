"""Work on other threads: `prefetch` computes results a few steps early, `BackgroundQueue` runs jobs in order.

`end_if_hung` ends a process some seconds after SIGTERM or Ctrl-C if a store hangs: in its calls Python raises nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
# results in flight: one waits while every core computes; more cost memory and no run is faster
LOOK_AHEAD = min(8, os.cpu_count() or 1)


def prefetch(jobs: Iterable[Callable[[], T]], depth: int = LOOK_AHEAD) -> Iterator[T]:
    """Yields the results of `jobs` in order, computed ahead by one thread per core, at most `depth` results ahead.

    Jobs are taken one at a time, each run in a copy of the caller's context. An error is raised where its result would
    have been yielded. A closed generator cancels the jobs that have not started and waits for the others.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        pending: deque[Future[T]] = deque()
        for job in jobs:
            pending.append(pool.submit(copy_context().run, job))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class BackgroundQueue:
    """A single worker thread that runs submitted jobs in order; a context manager that cancels pending jobs on exit."""

    def __init__(self, limit: int) -> None:
        """`limit`: maximum number of jobs that are submitted and not finished."""
        self.limit = limit
        self.pending: deque[Future[None]] = deque()
        self.thread = ThreadPoolExecutor(1)

    def submit(self, job: Callable[..., None], *args: Any) -> None:
        """Queues `job(*args)`; where the queue is full, waits for the oldest job and raises its error."""
        while len(self.pending) >= self.limit:
            self.pending.popleft().result()
        self.pending.append(self.thread.submit(job, *args))

    def is_idle(self) -> bool:
        return all(job.done() for job in self.pending)

    def finish(self) -> None:
        """Waits for all jobs; raises the error of the first that failed."""
        while self.pending:
            self.pending.popleft().result()

    def __enter__(self) -> BackgroundQueue:
        return self

    def __exit__(self, *error: object) -> None:
        self.thread.shutdown(cancel_futures=True)


GRACE = 4.0  # seconds that a call of a store gets to return after a signal: an upload that can be ended is ended sooner
WATCHED = 60.0  # seconds after a signal; a process that still runs then goes on
EXITS = {signal.SIGINT: 130, signal.SIGTERM: 143}  # exit code by signal, as in shells
_cleaning: list[Callable[[], None]] = []


def before_exit(clean: Callable[[], None]) -> None:
    """Registers a function that is called before a process with a hanging store is ended, as `atexit` is not."""
    _cleaning.append(clean)


@cache
def end_if_hung(report: Callable[[], None]) -> None:
    """Watches the signals of this process, only in its main thread; calls `report` before the process is ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    Thread(target=_watch_signals, args=(reading, report), name="hung stores", daemon=True).start()


def _watch_signals(reading: int, report: Callable[[], None]) -> None:
    while numbers := os.read(reading, 1):
        if code := EXITS.get(signal.Signals(numbers[0])):
            came = time.monotonic()
            while time.monotonic() < came + WATCHED:
                if _is_hanging(came, GRACE):
                    for function in (*_cleaning, report):
                        function()
                    os._exit(code)  # threads that wait for the store would hold up any other exit
                time.sleep(0.1)


_began: dict[object, float] = {}  # when each began, by `time.monotonic`; the calls of all threads


@contextmanager
def store_call() -> Iterator[None]:
    """The body is a call of a store."""
    mark = object()
    _began[mark] = time.monotonic()
    try:
        yield
    finally:
        del _began[mark]


def _is_hanging(since: float, seconds: float) -> bool:
    """Whether a call has not returned for `seconds`; only the time since this moment of `time.monotonic` counts."""
    now = time.monotonic()
    return any(now - max(began, since) > seconds for began in [*_began.values()])
