"""The two ends of a chat: a person at a terminal, or lines in a pipe."""

from __future__ import annotations

import json
import signal
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Protocol, cast

from llmconv.cli.command_group import Terminated
from llmconv.errors import LlmconvError, printable
from llmconv.progress import say

if TYPE_CHECKING:
    from collections.abc import Generator

    from llmconv.generation import TextPiece
    from llmconv.generation.chat_session import Chat

COMMANDS = "/reset forgets the chat, /system TEXT sets the system message, /quit or Ctrl-D ends, Ctrl-C stops an answer"


class ChatFrontend(Protocol):
    """Where lines come from and answers go."""

    def lines(self) -> Iterator[str]:
        """What the person writes."""

    def answer(self, pieces: Generator[TextPiece]) -> None:
        """Shows an answer while it grows."""

    def failed(self, error: LlmconvError) -> None:
        """Tells of an answer that there is not."""

    def note(self, text: str) -> None:
        """One line that is no answer."""


def talk(chat: Chat, name: str, as_json: bool = False) -> None:
    """Reads lines and answers them until there are no more.

    Args:
        chat: what answers.
        name: of the model, to greet with.
        as_json: answers are JSON lines.
    """
    end = _end(name, as_json)
    for line in end.lines():
        word, _, rest = line.strip().partition(" ")
        if word == "/quit":
            return
        if word == "/reset":
            chat.reset()
            end.note("the chat is forgotten")
        elif word == "/system":
            chat.system = rest.strip()
            end.note("the system message is set" if chat.system else "there is no system message any more")
        elif word in ("/help", "/?"):
            end.note(COMMANDS)
        elif word.startswith("/") and word[1:].isalpha():
            end.note(f"there is no {word}; {COMMANDS}")
        elif word:
            _answer(chat, line.rstrip("\r\n"), end)


def _end(name: str, as_json: bool) -> ChatFrontend:
    if as_json:
        return JsonLines()
    return Terminal(name) if sys.stdin.isatty() and sys.stdout.isatty() else Pipe()


def _answer(chat: Chat, line: str, end: ChatFrontend) -> None:
    with closing(cast("Generator[TextPiece]", chat.ask(line))) as pieces:
        try:
            end.answer(pieces)
        except LlmconvError as error:
            end.failed(error)


class Pipe:
    """stdin line by line, answers to stdout; the first that fails ends it."""

    def lines(self) -> Iterator[str]:
        """Every line."""
        yield from sys.stdin

    def answer(self, pieces: Generator[TextPiece]) -> None:
        """The text and a line break."""
        for piece in pieces:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        sys.stdout.write("\n")

    def failed(self, error: LlmconvError) -> None:
        """Ends the command."""
        raise error

    def note(self, text: str) -> None:
        """Talk."""
        say(text)


class JsonLines(Pipe):
    """A pipe with a JSON object per answer: its `text`, how many `tokens` it has, and the `finish`."""

    def answer(self, pieces: Generator[TextPiece]) -> None:
        """One line, once the answer is whole."""
        whole = list(pieces)
        text = "".join(piece.text for piece in whole)
        count = sum(piece.token is not None for piece in whole)
        finish = whole[-1].finish if whole else ""
        print(json.dumps({"text": text, "tokens": count, "finish": finish}), flush=True)


class Terminal:
    """A prompt, colours, and Ctrl-C for the answer alone."""

    def __init__(self, name: str) -> None:
        import readline  # noqa: F401 - editing and history of lines

        from rich.console import Console

        self._console = Console(highlight=False)
        self._console.print(f"{printable(name)}. {COMMANDS}.", style="dim", markup=False)

    def lines(self) -> Iterator[str]:
        """Every line that is entered."""
        while True:
            try:
                yield self._console.input("[bold green]>[/] ")
            except Terminated:
                raise
            except KeyboardInterrupt:
                self.note("\nCtrl-D or /quit ends")
            except EOFError:
                self._console.print()
                return

    def answer(self, pieces: Generator[TextPiece]) -> None:
        """The text as it grows, then how many tokens it had; Ctrl-C stops it."""
        count, finish, started = 0, "", 0.0
        with interruptible() as stopped:
            for piece in pieces:
                started = started or time.perf_counter()
                count += piece.token is not None
                finish = piece.finish
                sys.stdout.write(visible(piece.text))
                sys.stdout.flush()
                if stopped:
                    finish = "stopped"
                    break
        sys.stdout.write("\n")
        seconds = time.perf_counter() - started
        words = {"stopped": ", stopped", "length": ", cut off at the limit"}.get(finish, "")
        rate = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 else ""
        self.note(f"{count} tokens{rate}{words}")

    def failed(self, error: LlmconvError) -> None:
        """The error; the chat goes on as it was."""
        self._console.print(f"error: {error.message}", style="red", markup=False)
        self._console.print(f"hint: {error.hint}, or /reset", style="dim", markup=False)

    def note(self, text: str) -> None:
        """A quiet line."""
        self._console.print(text, style="dim", markup=False)


def visible(text: str) -> str:
    """`text` without control characters: a model may write escape sequences, which are orders to a terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in text)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C fills the list instead of breaking a step in two; pressed twice it interrupts all the same."""
    stopped: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
