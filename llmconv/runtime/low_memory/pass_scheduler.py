"""PassScheduler: many forward passes of one model, run layer by layer so that each layer's weights are read once.

Each pass runs the model's unchanged code in its own thread and waits at barriers: before every layer, and before every
product with a matrix that is read by rows. When all passes have reached the same barrier, the weights are loaded and
the calling thread does the work of all passes, one after another. Only one thread runs at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from llmconv.errors import UnsupportedInput

LOW_MEMORY_HINT = "run `llmconv verify` without `--low-memory`"

T = TypeVar("T")


class _Ended(BaseException):
    """Ends the thread of a pass whose result is no longer needed."""


@dataclass
class BarrierWork:
    """The work of one pass at a barrier, named after the layer or matrix; `work` runs once its weights are loaded."""

    barrier: str
    work: Callable[[], Any]
    result: Any = None


@dataclass
class ForwardPass(Generic[T]):
    """One forward pass in its own thread; `waiting` is the barrier of its `PassScheduler.wait`, None at the end."""

    run: Callable[[], T]
    waiting: BarrierWork | None = None
    result: T | None = None
    error: BaseException | None = None
    thread: threading.Thread | None = None
    ended: bool = False
    resume: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    paused: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class PassScheduler(Generic[T]):
    """Runs several forward passes from barrier to barrier.

    `serve` is called with a barrier, and with the index and work of every pass, and sets the result of each; `leave`
    with the barrier before each pass continues.
    """

    def __init__(
        self,
        serve: Callable[[str, Sequence[tuple[int, BarrierWork]]], None],
        leave: Callable[[str], None] = lambda barrier: None,
    ) -> None:
        self._serve, self._leave = serve, leave
        self._thread_local = threading.local()

    def wait(self, barrier: str, work: Callable[[], Any]) -> Any:
        """Waits, inside a pass, until all passes have reached the barrier; returns the result of the work."""
        this: ForwardPass[T] | None = getattr(self._thread_local, "current", None)
        if this is None:
            raise UnsupportedInput(f"`{barrier}` runs in a planned call only", hint=LOW_MEMORY_HINT)
        this.waiting = BarrierWork(barrier, work)
        this.paused.release()
        this.resume.acquire()
        if this.ended:
            raise _Ended
        result, this.waiting.result = this.waiting.result, None
        return result

    @property
    def number(self) -> int | None:
        """Index of the pass that runs in this thread; None outside of all passes."""
        return getattr(self._thread_local, "number", None)

    def run(self, runs: Sequence[Callable[[], T]]) -> list[T]:
        """The results of all passes; raises UnsupportedInput if they reach different barriers."""
        passes: list[ForwardPass[T]] = [ForwardPass(run) for run in runs]
        try:
            for number, this in enumerate(passes):
                self._start(number, this)
            while waiting := [(number, this) for number, this in enumerate(passes) if this.waiting]:
                self._step(waiting, len(passes))
        finally:
            for this in passes:
                _end(this)
        return [this.result for this in passes]  # type: ignore[misc]

    def _step(self, waiting: Sequence[tuple[int, ForwardPass[T]]], count: int) -> None:
        works = [(number, this.waiting) for number, this in waiting if this.waiting]
        barriers = {work.barrier for _, work in works}
        if len(barriers) > 1 or len(waiting) < count:
            raise UnsupportedInput(f"not every call runs `{min(barriers)}` in the same order", hint=LOW_MEMORY_HINT)
        barrier = barriers.pop()
        self._serve(barrier, works)
        for _, this in waiting:
            self._leave(barrier)
            _advance(this)

    def _start(self, number: int, this: ForwardPass[T]) -> None:
        threads = torch.get_num_threads()

        def body() -> None:
            this.resume.acquire()
            try:
                if not this.ended:
                    torch.set_num_threads(threads)  # the setting is per thread
                    self._thread_local.current, self._thread_local.number = this, number
                    this.result = this.run()
            except BaseException as error:  # raised again in the calling thread
                this.error = error
            this.waiting = None
            this.paused.release()

        this.thread = threading.Thread(target=body, daemon=True)
        this.thread.start()
        _advance(this)


def _advance(this: ForwardPass[Any]) -> None:
    """Lets a pass run to its next barrier, or to its end."""
    this.resume.release()
    this.paused.acquire()
    if this.error and not this.ended:
        raise this.error


def _end(this: ForwardPass[Any]) -> None:
    if this.thread and this.thread.is_alive():
        this.ended = True
        this.resume.release()
        this.thread.join()
