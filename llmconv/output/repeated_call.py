"""A command that another process repeats for some of its shards: it plans once, and writes one after another.

A plan costs seconds where a model has a thousand tensors, an adapter is hashed or headers come from a store.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

from llmconv.errors import LlmconvError, as_fields
from llmconv.output.work import Shards

Task = dict[str, Any]
"""`function` and `arguments` of a command, see `Call`, and the name of a `shard`."""

Answer = dict[str, str]
"""Of a shard; empty, or an error's `as_fields`."""


def error_of(task: Task, names: Iterator[str]) -> Answer:
    """Repeats a command for the shards that `names` yields; each is recorded in the journal when the next one is taken.

    Returns:
        The fields of the error that has ended it; empty if all shards are written.
    """
    module, name = task["function"]
    try:
        getattr(importlib.import_module(module), name)(**task["arguments"] | {"work": Shards(names)})
    except LlmconvError as error:
        return as_fields(error)
    for _ in names:  # of an output that another run has completed, as the command has found
        continue
    return {}


class RepeatedCall:
    """A command in a thread of its own, which waits for the next shard.

    Args:
        task: the command.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._asked: SimpleQueue[str | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer | BaseException] = SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, name: str) -> Answer:
        """Writes one shard. After an error the call is over, and `is_alive` false.

        Raises:
            Exception: any but a LlmconvError, which would be a fault of llmconv.
        """
        self._asked.put(name)
        answer = self._answers.get()
        if answer:
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
            if error := error_of(self._task, self._names()):
                self._answers.put(error)
        except BaseException as error:
            self._answers.put(error)

    def _names(self) -> Iterator[str]:
        while (name := self._asked.get()) is not None:
            yield name
            self._answers.put({})


_calls: dict[str, RepeatedCall] = {}
"""The call of this process by its run; at most one."""


def answer_to(task: Task) -> Answer:
    """Writes the shard of a task, with the plan of the last one if both are of the same run.

    Args:
        task: has a `run`, too, which is another in every run.
    """
    key = task["run"]
    if key not in _calls or not _calls[key].is_alive:
        for call in _calls.values():
            call.end()
        _calls.clear()
        _calls[key] = RepeatedCall(task)
    return _calls[key].write(task["shard"])
