"""Work on other threads: `prefetch` computes results a few steps early, `BackgroundQueue` runs jobs in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_AHEAD = 8  # results in flight: enough for the cores, few enough to stay small


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
