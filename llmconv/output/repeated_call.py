"""RepeatedCall: a command that plans once, and then writes the shards it is given, one after another."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

from llmconv.errors import LlmconvError
from llmconv.output.work import Shards

Answer = dict[str, Any]
"""Of a shard; empty, or the class, message and hint of an error."""


class RepeatedCall:
    """A call of a command in a thread of its own, which waits in the middle of it for shards.

    A plan costs seconds where a model has a thousand tensors, an adapter is hashed or headers come from a store.

    Args:
        task: the module and name of the function, and its arguments.
    """

    def __init__(self, task: dict[str, Any]) -> None:
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
        module, name = self._task["function"]
        try:
            function = getattr(importlib.import_module(module), name)
            function(**self._task["arguments"] | {"work": Shards(self._names())})
        except _Ended:
            return
        except LlmconvError as error:
            self._answers.put({"error": type(error).__name__, "message": error.message, "hint": error.hint})
        except BaseException as error:
            self._answers.put(error)

    def _names(self) -> Iterator[str]:
        while (name := self._asked.get()) is not None:
            yield name
            self._answers.put({})
        raise _Ended


class _Ended(Exception):
    """No more shards: what a command does after them is not for this process."""


_calls: dict[str, RepeatedCall] = {}
"""The call of this process by its key; at most one."""


def answer_to(task: dict[str, Any]) -> Answer:
    """Writes one shard, with the plan of the last one if both are of the same run.

    Args:
        task: `function`, `arguments` and `shard`, and `run`, which is another in every run.
    """
    key = task["run"]
    if key not in _calls or not _calls[key].is_alive:
        for call in _calls.values():
            call.end()
        _calls.clear()
        _calls[key] = RepeatedCall(task)
    return _calls[key].write(task["shard"])
