"""Computing a few steps ahead of who takes the results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from llmconv.output.streaming import LOOK_AHEAD

T = TypeVar("T")


def ahead(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The results of `tasks` in order, computed by as many threads as there are cores, at most `LOOK_AHEAD` early."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(copy_context().run, task))
                if len(waiting) > LOOK_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for left in waiting:
                left.cancel()
