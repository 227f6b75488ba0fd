"""What one input makes a parser do: a typed refusal or nothing is right, anything else is a finding."""

from __future__ import annotations

import codecs
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from llmconv.errors import LlmconvError
from tests.hostile.child import Watch

SECONDS = 3.0
"""Of processor time that an input may cost, and thrice of the clock's."""

MEBIBYTES = 500
ADDRESSES = 8 << 30


for _name in (
    "cp437",
    "latin1",
    "idna",
    "utf-16-le",
    "utf-16-be",
    "utf-32-le",
    "utf-32-be",
    "utf-16",
    "utf-32",
    "utf-8-sig",
):
    codecs.lookup(_name)  # loaded when the first file asks for it


class _TooLong(BaseException):
    """The clock's limit is over."""


@dataclass(frozen=True)
class Finding:
    """Something wrong.

    Attributes:
        kind: what tells it from others: the exception and its place, `time`, `memory`, or the event that was seen.
        text: for people.
    """

    kind: str
    text: str


class Watched:
    """One process that reads input after input in one folder; its audit hook stays for good."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watch = Watch()
        sys.addaudithook(self._watch.hook)
        signal.signal(signal.SIGALRM, _stop)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))

    def look(self, read: Callable[[], object]) -> Finding | None:
        """What is wrong with this reading."""
        before, began = _peak(), time.process_time()
        self._watch.begin(self._folder / "in", self._folder / "out")
        signal.setitimer(signal.ITIMER_REAL, 3 * SECONDS)
        try:
            read()
            failed = None
        except LlmconvError as error:
            failed = _plain(error)
        except _TooLong:
            failed = Finding("time", "it does not end")
        except BaseException as error:
            failed = _crash(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._watch.active = False
        seconds, grown = time.process_time() - began, _peak() - before
        if failed:
            return failed
        if self._watch.seen:
            return Finding(f"event {self._watch.seen[0].partition(' ')[0]}", "\n".join(self._watch.seen[:3]))
        if seconds > SECONDS:
            return Finding("time", f"{seconds:.1f} s")
        return Finding("memory", f"{grown} MiB") if grown > MEBIBYTES else None


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLong


def _peak() -> int:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _plain(error: LlmconvError) -> Finding | None:
    """A refusal is one line, with the code for bad input and a hint."""
    if error.exit_code == 3 and error.message.isprintable() and error.hint.isprintable() and error.hint:
        return None
    return Finding(f"message {type(error).__name__}", repr((error.exit_code, error.message, error.hint)))


def _crash(error: BaseException) -> Finding:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    text = "".join(traceback.format_exception(error)[-4:])
    return Finding(f"{type(error).__name__} {place}", text[-1500:])


def _is_own(file: str) -> bool:
    root = str(Path(__file__).parents[2])
    return file.startswith(root) and "/.venv/" not in file and "/tests/" not in file
