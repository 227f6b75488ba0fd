"""All errors that llmconv raises on purpose: a one-line message, and a hint with the way out.

LlmconvError
├── UsageProblem        exit 2   invalid or contradictory options
├── InputRefused        exit 3   the input cannot be used
│   ├── MalformedInput           truncated, inconsistent or hostile
│   └── UnsupportedInput         well-formed, but not supported
├── OutputFailed        exit 4   writing failed; safe to run again with --resume
├── OutOfMemory         exit 4   memory ran out
├── StageFailed         exit 4   a stage of the model in another process failed, or was lost
└── Inconclusive        exit 5   nothing could be compared
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar

SHOWN = 500  # maximum characters of a message, since names in a file may be longer
LISTED = 5  # names that a message shows before it counts the rest


def printable(text: str) -> str:
    """`text` as one printable line: names in a file may contain line breaks and escape sequences."""
    shown = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


KEPT = "finished files stay for `--resume`"  # note of an interrupt that left something to resume


class LlmconvError(Exception):
    """Base class of all errors: `message`, one line without a final period, and `hint`, what the user can do."""

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, *, hint: str) -> None:
        self.message, self.hint = printable(message).rstrip("."), printable(hint)
        super().__init__(self.message)


class UsageProblem(LlmconvError):
    """Invalid or contradictory options or arguments."""

    exit_code = 2


class InputRefused(LlmconvError):
    """The input cannot be used, or the output exists."""


class MalformedInput(InputRefused):
    """A file is truncated, inconsistent or hostile."""


class UnsupportedInput(InputRefused):
    """The input is well-formed, but not supported."""


class OutputFailed(LlmconvError):
    """Writing failed (disk full, permission, lock); finished files are kept for `--resume`."""

    exit_code = 4


class OutOfMemory(LlmconvError):
    """Memory ran out; there is no result."""

    exit_code = 4


class StageFailed(LlmconvError):
    """A stage of the model in another process failed, disconnected, or did not answer in time."""

    exit_code = 4


class Inconclusive(LlmconvError):
    """Nothing could be compared, so there is no verdict."""

    exit_code = 5


def first_line(error: BaseException, length: int = 300) -> str:
    """The first line of an exception's message, with the next one if it ends with a colon; its class if it has none."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[0] += f" {lines[1].strip()}"
    return lines[0][:length] if lines else type(error).__name__


def usage_line(text: str) -> str:
    """A message of click as one line like those of llmconv, without its names of types."""
    line = re.sub(r"'([^']+)'", r"`\1`", " ".join(text.split()).replace(". (", " (")).rstrip(".")
    line = line.replace("valid float range", "number").replace("valid integer range", "integer")
    return line[:1].lower() + line[1:]


def short(value: object, most: int = 40) -> str:
    """A value of a file in a message, with `…` where it is cut."""
    text = str(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def word(path: object) -> str:
    """A path as one word of a command that a hint shows, in quotes where a shell would divide it."""
    return shlex.quote(str(path))


def listing(names: Sequence[str]) -> str:
    """The first few names between backticks, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:LISTED])
    return shown + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def nearest(names: Sequence[str], known: Collection[str], spelled: Callable[[str], str] = str) -> str:
    """As `listing`, the first name with those of `known` that its `spelled` form is close to."""
    close = get_close_matches(spelled(names[0]), known, n=2, cutoff=0.5)
    like = f" (close: {' or '.join(f'`{one}`' for one in close)})" if close else ""
    shown, first = listing([name[:200] for name in names]), f"`{names[0][:200]}`"
    return first + like + shown.removeprefix(first)


def as_fields(error: LlmconvError) -> dict[str, str]:
    """An error as JSON, for another process; see `raise_fields`."""
    return {"error": type(error).__name__, "message": error.message, "hint": error.hint}


def raise_fields(fields: Mapping[str, Any]) -> None:
    """Raises the error that another process has made to `as_fields`; nothing happens if it is none."""
    if name := fields.get("error"):
        raise globals()[name](fields["message"], hint=fields["hint"])
