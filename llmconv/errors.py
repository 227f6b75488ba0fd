"""Every error llmconv raises on purpose: one clear line, and a hint that names the way out.

LlmconvError
├── UsageProblem        exit 2   the options contradict each other
├── InputRefused        exit 3   the input cannot be used
│   ├── MalformedInput           truncated, inconsistent or hostile
│   └── UnsupportedInput         well-formed, but of a kind llmconv does not know
├── OutputFailed        exit 4   writing failed; safe to run again with --resume
├── OutOfMemory         exit 4   memory ran out on the way
└── Inconclusive        exit 5   nothing could be compared
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

SHOWN = 500
"""Characters of a message: what a file names may be longer."""

LISTED = 5
"""Names that a message shows before it counts the rest."""


def printable(text: str) -> str:
    """One line that a terminal can show: what a file names may hold line breaks and escape sequences."""
    shown = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


class LlmconvError(Exception):
    """An error with a one-line message (no final period) and a hint that says what to do."""

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, *, hint: str) -> None:
        self.message, self.hint = printable(message).rstrip("."), printable(hint)
        super().__init__(self.message)


class UsageProblem(LlmconvError):
    """The options contradict each other or the output already exists."""

    exit_code = 2


class InputRefused(LlmconvError):
    """The input cannot be used; the hint says what to do about it."""


class MalformedInput(InputRefused):
    """A file is truncated, inconsistent or hostile."""


class UnsupportedInput(InputRefused):
    """The input is well-formed, but of a kind llmconv does not know."""


class OutputFailed(LlmconvError):
    """Writing failed (disk full, permission, lock); what was finished is kept for `--resume`."""

    exit_code = 4


class OutOfMemory(LlmconvError):
    """Memory ran out on the way; nothing is claimed."""

    exit_code = 4


class Inconclusive(LlmconvError):
    """Nothing could be compared, so nothing is claimed."""

    exit_code = 5


def first_line(error: BaseException, length: int = 300) -> str:
    """What another library's exception says first, cut to `length`; its class where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:length] if lines else type(error).__name__


def listing(names: Sequence[str]) -> str:
    """The first few names between backticks, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:LISTED])
    return shown + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
