"""Work: which shards of an output this process writes, and whether it publishes the output.

A plan is the same in every process, and every shard can be written alone. So `Part(3, 16)` writes a sixteenth of the
shards and publishes nothing, `Finish()` publishes what parts have written, `Workers(8)` does both in processes of its
own, and `Ray()` in tasks of a cluster. Schedulers, from Slurm to GNU parallel, need no more.

A plan costs seconds where a model has a thousand tensors, an adapter is hashed or headers come from a store. So a
worker, a process of this machine that repeats the command, plans once and writes one shard after another:

    stdin       {"function": …, "arguments": …, "shard": NAME}, once per shard
    stdout      {}, or an error

A worker that dies is replaced, and its shard is given to another one; a shard that is refused ends the run.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from threading import Thread
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

from llmconv.background import GRACE, end_if_hung
from llmconv.errors import LlmconvError, OutputFailed, UsageProblem, as_fields, raise_fields
from llmconv.output.plan import Plan, Shard
from llmconv.progress import set_quiet, warn_all, warnings_to

P = ParamSpec("P")
R = TypeVar("R")
MOST_PARTS = 10_000
MOST_WORKERS = 256


@dataclass(frozen=True)
class Part:
    """One part of the shards; nothing is published."""

    number: int  # from 0, below `count`
    count: int  # number of parts

    def __post_init__(self) -> None:
        _require_integers(number=self.number, count=self.count)
        if not 0 <= self.number < self.count <= MOST_PARTS:
            problem = f"there is no part {self.number}/{self.count}"
            raise UsageProblem(problem, hint=f"parts are 0/N to N-1/N, with N up to {MOST_PARTS:,}")

    @classmethod
    def parse(cls, text: str) -> Part:
        """The part that a text such as `3/16` names; UsageProblem if it names none."""
        if not (found := re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())):
            raise UsageProblem(f"`{text}` is not a part", hint="write it as `3/16`; the first of 16 is `0/16`")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def chosen(self, shards: Sequence[Shard]) -> set[str]:
        """Names of the shards of this part: the largest goes to the part with the fewest bytes so far, and so on."""
        sizes, mine = [0] * self.count, set()
        for shard in sorted(shards, key=lambda shard: (-shard.nbytes, shard.name)):
            part = min(range(self.count), key=sizes.__getitem__)
            sizes[part] += shard.nbytes
            if part == self.number:
                mine.add(shard.name)
        return mine


@dataclass(frozen=True)
class Shards:
    """Shards by name, each asked for when the last one is in the journal of the output; nothing is published."""

    names: Iterator[str]


@dataclass(frozen=True)
class Finish:
    """No shards: publishes what parts have written."""


@dataclass(frozen=True)
class Workers:
    """All shards, in processes of this machine, and publishes them."""

    count: int  # number of processes

    def __post_init__(self) -> None:
        _require_integers(count=self.count)
        if not 1 <= self.count <= MOST_WORKERS:
            raise UsageProblem(f"{self.count} workers are not possible", hint=f"give 1 to {MOST_WORKERS}")


@dataclass(frozen=True)
class Ray:
    """Publishes all shards, written in tasks of `RAY_ADDRESS`, a cluster here, or one that is started for the run."""


Work = Part | Shards | Finish | Workers | Ray


def _require_integers(**values: object) -> None:
    """Requires integers, since `Part(0.5, 2)` would select no shards; raises UsageProblem."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageProblem(f"`{name}` is {value!r:.40}, not an integer", hint="give an `int`")


def done_by(work: Work | None, plan: Plan, found: bool) -> Plan:
    """What a command returns: its plan, or the part that was written; `found` if the output was complete before."""
    if isinstance(work, Part) and not found:
        chosen = work.chosen(plan.shards)
        return replace(plan, shards=tuple(s for s in plan.shards if s.name in chosen), part=str(work))
    return replace(plan, found=found)


def require_possible(work: Work | None, *, overwrite: bool) -> None:
    """Raises UsageProblem for parts with `overwrite`: each would delete what the others have written."""
    if overwrite and isinstance(work, Part | Finish):
        raise UsageProblem("a part cannot replace an output", hint="remove the old one first, or choose another `-o`")


@dataclass(frozen=True)
class Call:
    """A call of a command (module, name, arguments of texts, numbers, paths), to be repeated with other `work`."""

    function: tuple[str, str]
    arguments: Mapping[str, Any]

    def fields(self) -> dict[str, Any]:
        return {"function": list(self.function), "arguments": {n: _plain(v) for n, v in self.arguments.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


_call: ContextVar[Call | None] = ContextVar("_call", default=None)


def current_call() -> Call:
    call = _call.get()
    assert call, "the command is not `repeatable`"
    return call


def repeatable(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of commands that other processes can repeat; `names` are those of their positional parameters."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            token = _call.set(Call((function.__module__, function.__name__), given))
            try:
                return function(*args, **kwargs)
            finally:
                _call.reset(token)

        return call

    return decorate


COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from llmconv.output.work import main; main()"
"""Python of a worker, whose arguments are the module search path of this process: with `-m`, Python would also import
from the current folder, which may be that of an untrusted model."""

TRIES = 3  # how often a shard is given to a worker that dies of it
JOIN = GRACE + 4  # seconds that a worker gets to end by itself, and to end its upload


def write_in_workers(call: Call, shards: Sequence[Shard], work: Workers, advance: Callable[[int], None]) -> None:
    """Writes shards in processes, which repeat `call` once; returns when all are in the journal of the output.

    `advance` is called with the bytes of each finished shard. Raises the first error of a worker, or OutputFailed if
    workers died of the same shard several times.
    """
    waiting: queue.SimpleQueue[Shard] = queue.SimpleQueue()
    for shard in sorted(shards, key=lambda shard: -shard.nbytes):
        waiting.put(shard)
    with ThreadPoolExecutor(work.count) as pool:
        warned: set[str] = set()
        drivers = [_Driver(call, waiting, advance, warned) for _ in range(min(work.count, len(shards)))]
        try:
            for run in as_completed([pool.submit(driver.run) for driver in drivers]):
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
            if (answer := self._ask(json.dumps({**self._call, "shard": shard.name}))) is not None:
                return take_answer(answer, self._warned)
        problem = f"{TRIES} workers died while they wrote `{shard.name}`"
        raise OutputFailed(problem, hint="is memory short? give fewer `--workers`, and run again with `--resume`")

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
    end_if_hung(lambda: None)  # the process that stops a worker reports it
    set_quiet(True)
    with suppress(_Stopped):
        tasks = iter(_Tasks())
        for task in tasks:
            # the names of shards, which a command writes with one plan, and None at the end
            names = chain((one["shard"] for one in chain([task], tasks)), [None])
            repeat(task, names.__next__, lambda answer: print(json.dumps(answer), file=out, flush=True))


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


Task = dict[str, Any]  # `function` and `arguments` of a command, see `Call`, and the name of a `shard`
Answer = dict[str, Any]  # of a shard: its `warnings`, if there are any; or an error's `as_fields`


def repeat(task: Task, next_name: Callable[[], str | None], answer: Callable[[Answer], None]) -> None:
    """Repeats a command for some of its shards; each is in the journal of the output when it is answered.

    `next_name` returns the name of the next shard, None if no more are to be written; `answer` takes the answer of
    each, an error as the last one.
    """
    warned: list[str] = []

    def names() -> Iterator[str]:
        while (name := next_name()) is not None:
            warned.clear()  # of the plan, which the first process has printed
            yield name
            answer({"warnings": [*warned]} if warned else {})

    module, function = task["function"]
    asked = names()
    try:
        with warnings_to(warned.append):
            getattr(importlib.import_module(module), function)(**task["arguments"] | {"work": Shards(asked)})
        for _ in asked:  # the command found the output complete: another run has written it
            continue
    except LlmconvError as error:
        answer(as_fields(error))


def take_answer(answer: Answer, warned: set[str]) -> None:
    """Raises the error of an answer, or prints its warnings, unless they are in `warned`, to which they are added."""
    raise_fields(answer)
    texts = [text for text in answer.get("warnings", ()) if text not in warned]
    warned.update(texts)
    warn_all(texts)


class RepeatedCall:
    """A command in a thread of its own, which waits for the next shard."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, name: str) -> Answer:
        """Writes one shard; after an error the call is over, and any but a LlmconvError is a bug of llmconv."""
        self._asked.put(name)
        answer = self._answers.get()
        if isinstance(answer, BaseException) or "error" in answer:
            self._thread.join()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @property
    def is_alive(self) -> bool:
        """Whether more shards can be written."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Ends the call, which closes its sources."""
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            repeat(self._task, self._asked.get, self._answers.put)
        except BaseException as error:
            self._answers.put(error)


_calls: dict[str, RepeatedCall] = {}  # the call of this process by its run; at most one


def answer_to(task: Task) -> Answer:
    """Writes the shard of a task, with the plan of the last task if both have the same `run`, unique to each run."""
    key = task["run"]
    if key not in _calls or not _calls[key].is_alive:
        for call in _calls.values():
            call.end()
        _calls.clear()
        _calls[key] = RepeatedCall(task)
    return _calls[key].write(task["shard"])
