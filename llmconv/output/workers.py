"""Workers: processes of this machine that plan once and write one shard after another, each named in a line of JSON.

    stdin       {"function": …, "arguments": …, "shard": NAME}, once per shard
    stdout      {}, or an error

A worker that dies is replaced, and its shard is given to another one; a shard that is refused ends the run.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from itertools import chain
from threading import Thread
from types import FrameType
from typing import NoReturn, TextIO

from llmconv.errors import OutputFailed
from llmconv.output.plan import Shard
from llmconv.output.repeated_call import Answer, Task, repeat, take_answer
from llmconv.output.work import Call, Workers
from llmconv.progress import set_quiet
from llmconv.stores import hung_calls

COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from llmconv.output.workers import main; main()"
"""Python of a worker, whose arguments are the module search path of this process: with `-m`, Python would also import
from the current folder, which may be that of an untrusted model."""

TRIES = 3
"""How often a shard is given to a worker that dies of it."""

JOIN = hung_calls.GRACE + 4
"""Seconds that a worker gets to end by itself, and to end its upload."""


def write_in_workers(call: Call, shards: Sequence[Shard], work: Workers, advance: Callable[[int], None]) -> None:
    """Writes shards in processes; returns when all are recorded in the journal of the output.

    Args:
        call: the command, which each worker repeats once.
        shards: to write.
        work: the number of processes.
        advance: called with the bytes of each finished shard.

    Raises:
        LlmconvError: the first error of a worker.
        OutputFailed: workers died of the same shard several times.
    """
    waiting: queue.SimpleQueue[Shard] = queue.SimpleQueue()
    for shard in sorted(shards, key=lambda shard: -shard.nbytes):
        waiting.put(shard)
    with ThreadPoolExecutor(work.count) as pool:
        warned: set[str] = set()
        drivers = [_Driver(call, waiting, advance, warned) for _ in range(min(work.count, len(shards)))]
        running = [pool.submit(driver.run) for driver in drivers]
        try:
            for run in as_completed(running):
                run.result()
        except BaseException:
            for driver in drivers:
                driver.stop()
            raise


class _Driver:
    """Gives shards to one worker, and starts another when it dies."""

    def __init__(
        self, call: Call, waiting: queue.SimpleQueue[Shard], advance: Callable[[int], None], warned: set[str]
    ) -> None:
        self._call, self._waiting, self._advance, self._warned = call.fields(), waiting, advance, warned
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(self) -> None:
        """Until no shard is left."""
        try:
            while not self._stopped:
                shard = self._waiting.get_nowait()
                self._write(shard)
                self._advance(shard.nbytes)
        except queue.Empty:
            return
        finally:
            self._end()

    def _write(self, shard: Shard) -> None:
        for _ in range(TRIES):
            if self._stopped:
                raise OutputFailed("a worker was stopped", hint="run again with `--resume`")
            answer = self._ask(json.dumps({**self._call, "shard": shard.name}))
            if answer is not None:
                return take_answer(answer, self._warned)
        raise OutputFailed(
            f"{TRIES} workers died while they wrote `{shard.name}`",
            hint="is memory short? give fewer `--workers`, and run again with `--resume`",
        )

    def _ask(self, line: str) -> Answer | None:
        """The worker's answer; None if it died."""
        if self._process is None:
            command = [sys.executable, "-c", COMMAND, *sys.path]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer.endswith("\n"):
            return dict(json.loads(answer))
        self._process.kill()  # it may still be about to end
        self._end()
        return None

    def stop(self) -> None:
        """Ends the worker in the middle of its shard."""
        self._stopped = True
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin and self._process.stdout
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(JOIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def main() -> None:
    """Writes the shards that stdin names, until it ends; SIGTERM ends it in the middle of one, with its upload."""
    out, sys.stdout = sys.stdout, sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all: the first process stops the others
    signal.signal(signal.SIGTERM, _terminated)
    hung_calls.watch(_nothing_to_say)
    set_quiet(True)
    with suppress(_Stopped):
        tasks = iter(_Tasks())
        for task in tasks:
            repeat(task, _names(chain([task], tasks)).__next__, partial(_answer, out))


def _names(tasks: Iterable[Task]) -> Iterator[str | None]:
    """The names of shards, which a command writes with one plan, and None at the end."""
    yield from (task["shard"] for task in tasks)
    yield None


def _answer(out: TextIO, answer: Answer) -> None:
    print(json.dumps(answer), file=out, flush=True)


class _Tasks:
    """The lines of stdin. If it ends during a task, the parent process has died, and this process exits.

    It would go on writing next to a run that replaces the dead one.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._taken = self._done = 0
        Thread(target=self._read, name="tasks", daemon=True).start()

    def __iter__(self) -> Iterator[Task]:
        while line := self._lines.get():
            yield json.loads(line)
            self._done += 1

    def _read(self) -> None:
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:  # no lock of `sys.stdin` at the exit
            for line in stdin:
                self._taken += 1
                self._lines.put(line)
        if self._taken > self._done:
            os.kill(os.getpid(), signal.SIGTERM)
        self._lines.put(b"")


class _Stopped(KeyboardInterrupt):
    """SIGTERM."""


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stopped


def _nothing_to_say() -> None:
    """The process that stops a worker reports it."""
