"""Time limits of onnxruntime: opening and running a graph are stopped after more time than its size can need.

A graph file of a kilobyte can contain a loop of 2^60 iterations, or constants of a terabyte. The limits grow with the
weights and the tokens, so that no real model is stopped even on a slow machine. They are limits of CPU time, since
other programs may hold the cores, and of `PATIENCE` times as much on the clock, since a device may compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from math import prod
from pathlib import Path
from typing import Any

import onnxruntime as ort

from llmconv.runtime.onnxruntime.session_settings import HOST

TOO_LONG = "the graph may be hostile: export it again from a model that you trust, or give it more time (`--timeout`)"
SECONDS = 60.0  # default minimum of every limit
# bytes of weights per second, read and multiplied with one token: a hundredth of the speed of a core
BYTES_LOADED, BYTES_COMPUTED = 20e6, 10e6
PAIRS = 1e5  # pairs of tokens per second in attention, likewise
PATIENCE = 10  # times a limit on the clock, if the process got less CPU time than the limit
POLL = 0.5
IDLE_POLLS = 20


class Deadline:
    """The time after which a block is late: seconds on the clock, and of CPU time or `PATIENCE` times as many."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._clock, self._cpu = seconds, time.monotonic(), time.process_time()

    def is_over(self) -> bool:
        passed, computed = time.monotonic() - self._clock, time.process_time() - self._cpu
        return passed > self._seconds and (computed > self._seconds or passed > PATIENCE * self._seconds)


class _Watchdog:
    """A thread that stops blocks after their time; it ends when no block has run for a while."""

    def __init__(self) -> None:
        self._numbers = count()
        self._running: dict[int, tuple[Deadline, Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def stopping(self, stop: Callable[[], None], seconds: float) -> Iterator[None]:
        """Context that calls `stop` repeatedly after `seconds`, see `Deadline`."""
        number = next(self._numbers)
        with self._lock:
            self._running[number] = Deadline(seconds), stop
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="llmconv-time-limit", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._running[number]

    def _look(self) -> None:
        idle = 0
        while True:
            time.sleep(POLL)
            with self._lock:
                idle = 0 if self._running else idle + 1
                if idle > IDLE_POLLS:
                    self._thread = None
                    return
                late = [stop for deadline, stop in self._running.values() if deadline.is_over()]
            for stop in late:
                stop()


_WATCHDOG = _Watchdog()
FOLDED = "optimization.constant_folding_max_output_size_in_bytes"
# maximum size of a folded constant, such as a table or converted weights: bytes, plus a multiple of the weights
FOLDED_BYTES, FOLDED_PER_BYTE = 256 << 20, 8


class TimeLimit:
    """A graph's sessions' limits, growing with `weight_bytes` from `seconds` (`SECONDS`); one exceeded ends all."""

    def __init__(self, weight_bytes: int, seconds: float | None = None) -> None:
        self.weight_bytes = weight_bytes
        self._least = SECONDS if seconds is None else seconds
        self._stopped = ""

    def bound_constants(self, options: ort.SessionOptions) -> None:
        """Limits the size of folded constants; the stages of a graph share their options."""
        try:
            options.get_session_config_entry(FOLDED)
        except RuntimeError:  # setting an entry twice would warn
            options.add_session_config_entry(FOLDED, str(FOLDED_BYTES + FOLDED_PER_BYTE * self.weight_bytes))

    @contextmanager
    def loading(self, options: ort.SessionOptions) -> Iterator[None]:
        """Context in which a session is opened with `options`; raises TimeoutError after the limit."""
        seconds = self._least + self.weight_bytes / BYTES_LOADED
        with self._limited(seconds, "opening it", lambda: options.set_load_cancellation_flag(True)):
            yield

    @contextmanager
    def running(self, new: int, total: int) -> Iterator[ort.RunOptions]:
        """Context in which a session runs with the returned options.

        `new` counts new tokens in the batch, `total` the tokens of a sequence, past included. Raises TimeoutError if
        the limit was exceeded now or before.
        """
        options = ort.RunOptions()
        seconds = self._least + self.weight_bytes * new / BYTES_COMPUTED + new * total / PAIRS
        with self._limited(seconds, f"{new} tokens", lambda: setattr(options, "terminate", True)):
            yield options

    @contextmanager
    def _limited(self, seconds: float, what: str, stop: Callable[[], None]) -> Iterator[None]:
        if self._stopped:
            raise TimeoutError(self._stopped)
        stopped = threading.Event()

        def stop_late() -> None:
            stopped.set()
            stop()

        try:
            with _WATCHDOG.stopping(stop_late, seconds):
                yield
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            if not stopped.is_set():
                raise
            self._stopped = f"it was stopped: {what} took more than {seconds:.0f} s, which no model of its size needs"
            raise TimeoutError(self._stopped) from error


FEEDS = 3  # the first inputs are tokens, mask and positions


class LimitedSession:
    """An `InferenceSession` of a file or its content whose opening and runs raise TimeoutError after the limit."""

    def __init__(
        self, graph: Path | bytes, options: ort.SessionOptions, providers: Sequence[Any], limit: TimeLimit
    ) -> None:
        self._limit = limit
        limit.bound_constants(options)
        with limit.loading(options):
            self._session = ort.InferenceSession(graph, options, list(providers))
        self.get_inputs, self.get_outputs = self._session.get_inputs, self._session.get_outputs
        self.get_session_options, self.get_providers = self._session.get_session_options, self._session.get_providers
        self.get_overridable_initializers = self._session.get_overridable_initializers
        self.io_binding = self._session.io_binding

    def run_with_ort_values(self, names: Sequence[str], feeds: Mapping[str, ort.OrtValue]) -> list[ort.OrtValue]:
        with self._limit.running(*_tokens([value.shape() for value in islice(feeds.values(), FEEDS)])) as options:
            values: list[ort.OrtValue] = self._session.run_with_ort_values(names, feeds, options)
        return values

    def run_on_device(
        self, outputs: Mapping[str, str], feeds: Mapping[str, ort.OrtValue], index: int
    ) -> list[ort.OrtValue]:
        """Like `run_with_ort_values`, with outputs left on `cpu` or device `index`, where the next run reads them."""
        binding = self.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name, memory in outputs.items():
            binding.bind_output(name, memory, index if memory != HOST else 0)
        self.run_with_iobinding(binding, [value.shape() for value in islice(feeds.values(), FEEDS)])
        values: list[ort.OrtValue] = binding.get_outputs()
        return values

    def run(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        with self._limit.running(*_tokens([array.shape for array in islice(feeds.values(), FEEDS)])) as options:
            values: list[Any] = self._session.run(names, feeds, options)
        return values

    def run_with_iobinding(self, binding: ort.IOBinding, shapes: Sequence[Sequence[int]]) -> None:
        """As in `InferenceSession`; `shapes` are those of tokens, mask and positions."""
        with self._limit.running(*_tokens(shapes)) as options:
            self._session.run_with_iobinding(binding, options)


def _tokens(shapes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Number of new tokens in the batch, and length of a sequence with its past, from the first inputs' shapes."""
    new = max((prod(shape[:2]) for shape in shapes[:1]), default=1)
    return max(1, new), max((size for shape in shapes for size in shape[:2]), default=1)
