"""One thread that owns the model and takes turns, a step each, between the answers that are under way."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from llmconv.errors import LlmconvError
from llmconv.serve.api_errors import ApiError

Item = TypeVar("Item")
Result = TypeVar("Result")

log = logging.getLogger("llmconv.serve")

LONGEST_WAIT = 60
"""Seconds: the most that `Retry-After` says."""
LAST_STEP = 10
"""Seconds that the last step gets when everything ends."""


class ShuttingDown(ApiError):
    """The server is ending."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", status=503, code="shutting_down")


class Job(Generic[Item]):
    """An answer under way: its steps run in the worker's thread, its items arrive in the event loop's.

    Args:
        steps: every `next()` is one turn.
    """

    def __init__(self, steps: Iterator[Item]) -> None:
        self.steps = steps
        self.cancelled = False
        self.started = 0.0
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()

    def cancel(self) -> None:
        """Gives the place back at the next turn; from any thread."""
        self.cancelled = True

    def deliver(self, item: Item | BaseException | None) -> None:
        """An item, the error that ended the answer, or None for its end; from the worker's thread."""
        with suppress(RuntimeError):  # the loop has ended: nobody listens
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, item)

    async def items(self, every: float | None = None) -> AsyncIterator[Item | None]:
        """The items as they arrive; None where nothing came for `every` seconds.

        Raises:
            BaseException: what the steps raised.
        """
        while True:
            try:
                async with asyncio.timeout(every):
                    item = await self._arrived.get()
            except TimeoutError:
                yield None
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item


class Scheduler:
    """Runs jobs, so many side by side and so many waiting.

    Args:
        active: answers that take turns; each has a cache of its own.
        waiting: further ones that wait for a place; one more is refused.
    """

    def __init__(self, active: int, waiting: int) -> None:
        self._most_active, self._most_waiting = active, waiting
        self._active: deque[Job[Any]] = deque()
        self._waiting: deque[Job[Any]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._change = threading.Condition()
        self._deadline: float | None = None
        self._ended = False
        self._mean_seconds = 1.0
        self._thread = threading.Thread(target=self._work, name="llmconv-model", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, steps: Iterator[Item]) -> Job[Item]:
        """Gives the steps a place, in the event loop's thread.

        Raises:
            ApiError: 429, every place is taken; 503, the server is ending.
        """
        job = Job(steps)
        with self._change:
            if self._deadline is not None:
                raise ShuttingDown
            self._forget_cancelled()
            if len(self._active) + len(self._waiting) >= self._most_active + self._most_waiting:
                raise self._full()
            self._waiting.append(job)
            self._admit()
            self._change.notify()
        return job

    async def call(self, function: Callable[[], Result]) -> Result:
        """What `function` gives in the worker's thread, between two steps: the tokenizer is of that thread too.

        Raises:
            ApiError: 503, the server is ending.
            BaseException: what the function raised.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def run() -> None:
            result, error = None, None
            try:
                result = function()
            except Exception as caught:
                error = caught
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, error)

        with self._change:
            if self._ended:
                raise ShuttingDown
            self._calls.append(run)
            self._change.notify()
        return await future

    def load(self) -> dict[str, int]:
        """How many answers are under way and how many wait."""
        with self._change:
            self._forget_cancelled()
            return {"active": len(self._active), "waiting": len(self._waiting)}

    def drain(self, grace: float) -> None:
        """Takes nothing new, refuses what waits, and ends what runs after `grace` seconds; from any thread but ours.

        It is called from a signal handler, so it takes no lock that the interrupted thread may hold.
        """
        self._deadline = time.monotonic() + grace
        threading.Thread(target=self._wake, daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends everything now and waits for the step that is under way."""
        self.drain(0)
        with self._change:
            self._ended = True
            self._change.notify()
        self._thread.join(timeout=LAST_STEP)

    def _wake(self) -> None:
        with self._change:
            self._change.notify()

    def _work(self) -> None:
        while True:
            with self._change:
                while not (self._calls or self._active or self._waiting or self._ended):
                    self._change.wait()
                if self._ended and not self._calls:
                    break
                calls, job = list(self._calls), self._next_job()
                self._calls.clear()
            for call in calls:
                call()
            if job:
                self._turn(job)
        for job in (*self._active, *self._waiting):
            job.deliver(ShuttingDown())

    def _next_job(self) -> Job[Any] | None:
        """Whose turn it is; with the lock held. What was cancelled or is out of time leaves."""
        if self._deadline is not None:
            self._refuse(self._waiting)
            if time.monotonic() >= self._deadline:
                self._refuse(self._active)
        self._admit()
        return self._active[0] if self._active else None

    def _admit(self) -> None:
        """Who waits takes the free places; with the lock held."""
        while self._waiting and len(self._active) < self._most_active:
            job = self._waiting.popleft()
            job.started = time.monotonic()
            self._active.append(job)

    def _refuse(self, jobs: deque[Job[Any]]) -> None:
        for job in jobs:
            _close(job)
            job.deliver(ShuttingDown())
        jobs.clear()

    def _turn(self, job: Job[Any]) -> None:
        """One step of a job, which then stands at the end of the row."""
        going = False
        try:
            if not job.cancelled:
                job.deliver(next(job.steps))
                going = True
        except StopIteration:
            job.deliver(None)
        except Exception as error:
            if not isinstance(error, ApiError | LlmconvError):
                log.exception("an answer failed")
            job.deliver(error)
        if not going:
            _close(job)
        with self._change:
            self._active.remove(job)
            if going:
                self._active.append(job)
            else:
                self._mean_seconds += (time.monotonic() - job.started - self._mean_seconds) / 4

    def _forget_cancelled(self) -> None:
        """Clients that hung up while they waited make room; with the lock held."""
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)

    def _full(self) -> ApiError:
        seconds = self._mean_seconds * (len(self._waiting) + 1) / self._most_active
        return ApiError(
            f"all {self._most_active} places and the queue of {self._most_waiting} are taken: try again later",
            status=429,
            code="queue_full",
            headers={"Retry-After": str(min(max(round(seconds), 1), LONGEST_WAIT))},
        )


def _close(job: Job[Any]) -> None:
    """Frees what the steps hold."""
    try:
        getattr(job.steps, "close", lambda: None)()
    except Exception:  # or the thread would end, and with it every other answer
        log.exception("an answer could not be closed")
