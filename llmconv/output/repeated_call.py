"""A command that another process repeats for some of its shards: it plans once, and writes one after another.

A plan costs seconds where a model has a thousand tensors, an adapter is hashed or headers come from a store.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

from llmconv.errors import LlmconvError, as_fields, raise_fields
from llmconv.output.work import Shards
from llmconv.progress import warn_all, warnings_to

Task = dict[str, Any]
"""`function` and `arguments` of a command, see `Call`, and the name of a `shard`."""

Answer = dict[str, Any]
"""Of a shard: its `warnings`, if there are any; or an error's `as_fields`."""


def repeat(task: Task, next_name: Callable[[], str | None], answer: Callable[[Answer], None]) -> None:
    """Repeats a command for some of its shards; each is in the journal of the output when it is answered.

    Args:
        task: the command.
        next_name: the name of the next shard; None if no more are to be written.
        answer: takes the answer of each shard. An error is the last one.
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
