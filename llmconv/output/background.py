"""Behind: a thread that does what it is given in order, while whoever gives it goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Behind:
    """One thread, at most `limit` things behind; a context, at whose end nothing more is begun."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pending: deque[Future[None]] = deque()
        self.thread = ThreadPoolExecutor(1)

    def start(self, work: Callable[..., None], *args: Any) -> None:
        """Has it done; waits, and raises what earlier work raised, where too much is behind."""
        while len(self.pending) >= self.limit:
            self.pending.popleft().result()
        self.pending.append(self.thread.submit(work, *args))

    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return all(work.done() for work in self.pending)

    def finish(self) -> None:
        """Waits until all is done; raises what it raised."""
        while self.pending:
            self.pending.popleft().result()

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, *error: object) -> None:
        self.thread.shutdown(cancel_futures=True)
