"""Work: which shards of an output this process writes, and whether it publishes the output.

A plan is the same in every process, and every shard can be written alone. So `Part(3, 16)` writes a sixteenth of the
shards and publishes nothing, `Finish()` publishes what parts have written, `Workers(8)` does both in processes of its
own, and `Ray()` in tasks of a cluster. Schedulers, from Slurm to GNU parallel, need no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from llmconv.errors import UsageProblem
from llmconv.output.plan import Plan, Shard

P = ParamSpec("P")
R = TypeVar("R")

MOST_PARTS = 10_000
MOST_WORKERS = 256


@dataclass(frozen=True)
class Part:
    """One part of the shards; nothing is published.

    Attributes:
        number: from 0, below `count`.
        count: number of parts.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        _require_integers(number=self.number, count=self.count)
        if not 0 <= self.number < self.count <= MOST_PARTS:
            raise UsageProblem(
                f"there is no part {self.number}/{self.count}",
                hint=f"parts are 0/N to N-1/N, with N up to {MOST_PARTS:,}",
            )

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
    """Shards by name; nothing is published.

    Attributes:
        names: the next one is asked for when the last one is recorded in the journal of the output.
    """

    names: Iterator[str]


@dataclass(frozen=True)
class Finish:
    """No shards: publishes what parts have written."""


@dataclass(frozen=True)
class Workers:
    """All shards, in processes of this machine, and publishes them.

    Attributes:
        count: number of processes.
    """

    count: int

    def __post_init__(self) -> None:
        _require_integers(count=self.count)
        if not 1 <= self.count <= MOST_WORKERS:
            raise UsageProblem(f"{self.count} workers are not possible", hint=f"give 1 to {MOST_WORKERS}")


@dataclass(frozen=True)
class Ray:
    """All shards, in tasks of a Ray cluster, and publishes them.

    The cluster is that of `RAY_ADDRESS`, else one that runs on this machine, else one that is started for the run.
    """


Work = Part | Shards | Finish | Workers | Ray


def _require_integers(**values: object) -> None:
    """Requires integers, since `Part(0.5, 2)` would select no shards; raises UsageProblem."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageProblem(f"`{name}` is {value!r:.40}, not an integer", hint="give an `int`")


def done_by(work: Work | None, plan: Plan, found: bool) -> Plan:
    """What a command returns: its plan, or the part of it that was written.

    Args:
        work: of this process.
        plan: of the whole output.
        found: the output was complete before.
    """
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
    """A call of a command, which another process can repeat with other `work`.

    Attributes:
        function: dotted name of its module, and its name.
        arguments: by name; texts, numbers, paths and lists of these.
    """

    function: tuple[str, str]
    arguments: Mapping[str, Any]

    def fields(self) -> dict[str, Any]:
        """The call as JSON."""
        return {"function": list(self.function), "arguments": {n: _plain(v) for n, v in self.arguments.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


_call: ContextVar[Call | None] = ContextVar("_call", default=None)


def current_call() -> Call:
    """The call of the command that is running."""
    call = _call.get()
    assert call, "the command is not `repeatable`"
    return call


def repeatable(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of commands that other processes can repeat; `names` are those of their positional parameters."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            with _calling(Call((function.__module__, function.__name__), given)):
                return function(*args, **kwargs)

        return call

    return decorate


@contextmanager
def _calling(call: Call) -> Iterator[None]:
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)
