"""The scheduler: a limited number of answers take turns, one step of the model each, in a thread of their own.

One thread owns the model and runs one step of each answer; another one prepares prompts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from llmconv.errors import LlmconvError
from llmconv.serve.fields import ApiError

Item = TypeVar("Item")
Result = TypeVar("Result")
log = logging.getLogger("llmconv.serve")
MAX_RETRY_AFTER = 60  # maximum of `Retry-After`, in seconds
LAST_STEP_SECONDS = 10  # time for the last step when the server stops


class ShuttingDown(ApiError):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", status=503, code="shutting_down")


class Job(Generic[Item]):
    """A request in progress: its steps, a turn each, run in the worker thread; items arrive in the event loop."""

    def __init__(self, steps: Iterator[Item]) -> None:
        self.steps = steps
        self.canceled = False
        self.started = 0.0
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()

    def cancel(self) -> None:
        """Ends the job at its next turn; callable from any thread."""
        self.canceled = True

    def deliver(self, item: Item | BaseException | None) -> None:
        """Sends an item, the error that ended the job, or None for its end; called in the worker thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, item)

    async def items(self, every: float | None = None) -> AsyncIterator[Item | None]:
        """The items as they arrive, None when nothing came for `every` seconds; raises what the steps raised."""
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
    """Runs a limited number of jobs in turn, and lets a limited number wait; calls that prepare them wait, too.

    Each of the `active` jobs has its own cache; at most `waiting` jobs and calls are in the queue, further ones are
    refused.
    """

    def __init__(self, active: int, waiting: int) -> None:
        self._most_active, self._most_waiting = active, waiting
        self._active: deque[Job[Any]] = deque()
        self._waiting: deque[Job[Any]] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_preparing = False  # a call runs
        self._further = 0  # places of further answers of active jobs
        self._change = threading.Condition()
        self._deadline: float | None = None
        self._ended = False
        self._mean_seconds = 1.0
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._work, "llmconv-model"), (self._prepare, "llmconv-prompts"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, steps: Iterator[Item]) -> Job[Item]:
        """Adds a job, in the event loop; raises ApiError 429 if the queue is full, 503 while the server stops."""
        job = Job(steps)
        with self._change:
            self._require_room()
            self._waiting.append(job)
            self._admit()
            self._change.notify_all()
        return job

    async def call(self, function: Callable[[], Result]) -> Result:
        """Calls `function` in the thread of prompts, one call at a time, since the tokenizer is not thread-safe.

        A call that is canceled while it waits is not made. Raises what the function raises, and as `submit`.
        """
        future: Future[Result] = Future()
        with self._change:
            self._require_room()
            self._calls.append((future, function))
            self._change.notify_all()
        return await asyncio.wrap_future(future)

    def take(self) -> bool:
        """Takes a free place for a further answer of an active job, unless jobs wait for it."""
        with self._change:
            is_free = not self._waiting and len(self._active) + self._further < self._most_active
            self._further += is_free
            return is_free

    def give(self) -> None:
        """Gives the place of a further answer back."""
        with self._change:
            self._further -= 1

    def load(self) -> dict[str, int]:
        """The number of active and of waiting requests."""
        with self._change:
            return {"active": len(self._active), "waiting": self._count_waiting()}

    def drain(self, grace: float) -> None:
        """Refuses jobs, ends active ones after `grace` seconds; called in a signal handler, so it takes no lock."""
        self._deadline = time.monotonic() + grace
        threading.Thread(target=self._wake, daemon=True).start()

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Ends all jobs now and waits for the current step."""
        self.drain(0)
        with self._change:
            self._ended = True
            self._change.notify_all()
        end = time.monotonic() + LAST_STEP_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(end - time.monotonic(), 0))

    def _wake(self) -> None:
        with self._change:
            self._change.notify_all()

    def _prepare(self) -> None:
        """The thread of prompts."""
        while True:
            with self._change:
                while not (self._calls or self._ended):
                    self._change.wait()
                if self._ended:
                    break
                future, function = self._calls.popleft()
                self._is_preparing = is_wanted = future.set_running_or_notify_cancel()
            if not is_wanted:
                continue
            try:
                deliver = partial(future.set_result, function())
            except Exception as caught:
                deliver = partial(future.set_exception, caught)
            with self._change:  # before its client can send the next request
                self._is_preparing = False
            deliver()
        for future, _ in self._calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(ShuttingDown())

    def _work(self) -> None:
        while True:
            with self._change:
                while not (self._active or self._waiting or self._ended):
                    self._change.wait()
                if self._ended:
                    break
                # the job whose turn it is; with the lock held. After the deadline all jobs are ended
                if self._deadline is not None:
                    self._refuse(self._waiting)
                    if time.monotonic() >= self._deadline:
                        self._refuse(self._active)
                self._admit()
                job = self._active[0] if self._active else None
            if job:
                self._turn(job)
        for job in (*self._active, *self._waiting):
            job.deliver(ShuttingDown())

    def _admit(self) -> None:
        """Moves waiting jobs to free places; with the lock held."""
        while self._waiting and len(self._active) + self._further < self._most_active:
            job = self._waiting.popleft()
            job.started = time.monotonic()
            self._active.append(job)

    def _refuse(self, jobs: deque[Job[Any]]) -> None:
        for job in jobs:
            _close(job)
            job.deliver(ShuttingDown())
        jobs.clear()

    def _turn(self, job: Job[Any]) -> None:
        """Runs one step of a job, which then goes to the end of the queue."""
        going = False
        last: Exception | None = None
        try:
            if not job.canceled:
                job.deliver(next(job.steps))
                going = True
        except StopIteration:
            pass
        except Exception as error:
            if not isinstance(error, ApiError | LlmconvError):
                log.exception("an answer failed")
            last = error
        if not going:
            _close(job)
        with self._change:
            self._active.remove(job)
            if going:
                self._active.append(job)
            else:
                self._mean_seconds += (time.monotonic() - job.started - self._mean_seconds) / 4
        if not going:  # after its place is free: its client can send the next request at once
            job.deliver(last)

    def _require_room(self) -> None:
        """Refuses a further request if the queue is full, or the server is shutting down; with the lock held."""
        if self._deadline is not None:
            raise ShuttingDown
        if len(self._active) + self._count_waiting() >= self._most_active + self._most_waiting:
            seconds = self._mean_seconds * (self._count_waiting() + 1) / self._most_active
            problem = f"the server is busy ({self._most_active} active, queue of {self._most_waiting} is full)"
            headers = {"Retry-After": str(min(max(round(seconds), 1), MAX_RETRY_AFTER))}
            raise ApiError(f"{problem}: try again later", status=429, code="queue_full", headers=headers)

    def _count_waiting(self) -> int:
        """Number of jobs and calls that wait or are prepared, without those whose clients left; with the lock held."""
        self._waiting = deque(job for job in self._waiting if not job.canceled)
        self._calls = deque(call for call in self._calls if not call[0].done())
        return len(self._waiting) + len(self._calls) + self._is_preparing


def _close(job: Job[Any]) -> None:
    try:
        getattr(job.steps, "close", lambda: None)()
    except Exception:  # an error must not end the thread
        log.exception("an answer could not be closed")
