"""Problems found inside a file: raised without the file's name, which `naming` adds where the file is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmconv.errors import MalformedInput


class FileProblem(Exception):
    """A problem, worded to follow the name of its file, such as "is truncated".

    `hint` is the way out; empty for the one that `naming` was given.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint


@contextmanager
def naming(subject: str, hint: str) -> Iterator[None]:
    """Turns a FileProblem raised inside into MalformedInput, such as "`model.safetensors` is truncated".

    `hint` is the way out, unless the problem has its own.
    """
    try:
        yield
        return
    except FileProblem as problem:
        named = MalformedInput(f"{subject} {problem}", hint=problem.hint or hint)
    raise named  # here, where it does not hold the frames of the problem, and what they read
