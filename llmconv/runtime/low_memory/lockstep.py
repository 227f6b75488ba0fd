"""Lockstep: many forward passes of one model side by side, so that each layer's weights are read once for all.

Every pass runs the model's own code in a thread of its own, and waits wherever a station begins: a layer, or a product
with a matrix that is read by rows. When all have come to the same station, its weights are fetched and the work of all
is done, one after another, in the thread that called. Only one thread runs at any time: they are coroutines in a model
whose code knows nothing of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from llmconv.errors import UnsupportedInput

HINT = "run `llmconv verify` without `--low-memory`"

T = TypeVar("T")


class _Ended(BaseException):
    """Ends a thread whose pass is of no more use."""


@dataclass
class Arrival:
    """What a pass waits for.

    Attributes:
        station: a name.
        work: makes the result once the station's weights are there.
        result: of the work.
    """

    station: str
    work: Callable[[], Any]
    result: Any = None


@dataclass
class Pass(Generic[T]):
    """One forward pass.

    Attributes:
        run: the pass; it calls `Lockstep.arrive` on its way.
        arrival: where it waits; None when it is done.
        result: what `run` returned.
    """

    run: Callable[[], T]
    arrival: Arrival | None = None
    result: T | None = None
    error: BaseException | None = None
    thread: threading.Thread | None = None
    ended: bool = False
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    back: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Lockstep(Generic[T]):
    """Runs passes from station to station.

    Args:
        serve: given a station and the numbers and arrivals of all passes, sets every arrival's result.
        leave: called with the station before each pass goes on from it.
    """

    def __init__(
        self,
        serve: Callable[[str, Sequence[tuple[int, Arrival]]], None],
        leave: Callable[[str], None] = lambda station: None,
    ) -> None:
        self._serve, self._leave = serve, leave
        self._here = threading.local()

    def arrive(self, station: str, work: Callable[[], Any]) -> Any:
        """Called within a pass: waits until all are here, and returns the result of the work."""
        this: Pass[T] | None = getattr(self._here, "current", None)
        if this is None:
            raise UnsupportedInput(f"`{station}` runs in a planned call only", hint=HINT)
        this.arrival = Arrival(station, work)
        this.back.release()
        this.go.acquire()
        if this.ended:
            raise _Ended
        result, this.arrival.result = this.arrival.result, None
        return result

    @property
    def number(self) -> int | None:
        """Of the pass that asks; None outside of any."""
        return getattr(self._here, "number", None)

    def run(self, runs: Sequence[Callable[[], T]]) -> list[T]:
        """What all passes return.

        Raises:
            UnsupportedInput: the passes go to different stations.
        """
        passes: list[Pass[T]] = [Pass(run) for run in runs]
        try:
            for number, this in enumerate(passes):
                self._start(number, this)
            while waiting := [(number, this) for number, this in enumerate(passes) if this.arrival]:
                self._step(waiting, len(passes))
        finally:
            for this in passes:
                _end(this)
        return [this.result for this in passes]  # type: ignore[misc]

    def _step(self, waiting: Sequence[tuple[int, Pass[T]]], count: int) -> None:
        arrivals = [(number, this.arrival) for number, this in waiting if this.arrival]
        stations = {arrival.station for _, arrival in arrivals}
        if len(stations) > 1 or len(waiting) < count:
            raise UnsupportedInput(
                f"not every call goes through `{min(stations)}` in its turn",
                hint=HINT,
            )
        station = stations.pop()
        self._serve(station, arrivals)
        for _, this in waiting:
            self._leave(station)
            _advance(this)

    def _start(self, number: int, this: Pass[T]) -> None:
        threads = torch.get_num_threads()

        def body() -> None:
            this.go.acquire()
            try:
                if not this.ended:
                    torch.set_num_threads(threads)  # a new thread begins with a number of its own
                    self._here.current, self._here.number = this, number
                    this.result = this.run()
            except BaseException as error:  # raised again where the passes are run
                this.error = error
            this.arrival = None
            this.back.release()

        this.thread = threading.Thread(target=body, daemon=True)
        this.thread.start()
        _advance(this)


def _advance(this: Pass[Any]) -> None:
    """Lets a pass run to its next station, or to its end."""
    this.go.release()
    this.back.acquire()
    if this.error and not this.ended:
        raise this.error


def _end(this: Pass[Any]) -> None:
    if this.thread and this.thread.is_alive():
        this.ended = True
        this.go.release()
        this.thread.join()
