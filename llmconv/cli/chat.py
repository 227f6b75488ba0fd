"""`llmconv chat`, and its input and output: a terminal, a pipe, or JSON lines."""

from __future__ import annotations

import json
import signal
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command, Terminated
from llmconv.cli.options import option
from llmconv.errors import LlmconvError, printable
from llmconv.files.sources import model_name
from llmconv.progress import say


@click.command("chat", cls=Command)
@click.argument("model", metavar="FOLDER")
@option("--system TEXT", "System message at the start of the chat.", default="")
@options.template
@options.picking
@options.running
@options.trust_remote_code
@option("--json as_json", "One JSON object per answer on stdout.")
@options.talk
def command(model: str, system: str, template: str, as_json: bool, **given: Any) -> None:
    """Chat with the model in FOLDER.

    Each line is a message: typed at the prompt of a terminal, or read from stdin. Each turn runs only the new tokens.
    /reset clears the chat, /system TEXT sets the system message, /quit or Ctrl-D exits, Ctrl-C stops an answer.
    """
    from llmconv.generation.chat_session import Chat
    from llmconv.generation.generate import opener

    opened = opener(options.with_graphs(model, given), cast(Any, given))()
    picked = options.settings(options.without_running(given))
    settings = opened.defaults.but(eos_token_id=opened.chat_ends).but(**picked)
    talk(Chat(opened, settings, template=template, system=system), model_name(opened.folder), as_json)


if TYPE_CHECKING:
    from collections.abc import Generator

    from llmconv.generation import TextPiece
    from llmconv.generation.chat_session import Chat

COMMANDS = "/reset clears the chat, /system TEXT sets the system message, /quit or Ctrl-D exits, Ctrl-C stops an answer"


def talk(chat: Chat, name: str, as_json: bool = False) -> None:
    """Reads lines and answers them until the input ends; with `as_json`, prints answers as JSON lines."""
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    frontend = JsonLines() if as_json else Terminal(name) if is_interactive else Pipe()
    for line in frontend.lines():
        word, _, rest = line.strip().partition(" ")
        if word == "/quit":
            return
        if word == "/reset":
            chat.reset()
            frontend.note("the chat is cleared")
        elif word == "/system":
            chat.system = rest.strip()
            frontend.note("the system message is set" if chat.system else "the system message is removed")
        elif word in ("/help", "/?"):
            frontend.note(COMMANDS)
        elif word.startswith("/") and word[1:].isalpha():
            frontend.note(f"unknown command {word}; {COMMANDS}")
        elif word:
            with closing(cast("Generator[TextPiece]", chat.ask(line.rstrip("\r\n")))) as pieces:
                try:
                    frontend.answer(pieces)
                except LlmconvError as error:
                    frontend.failed(error)


class Pipe:
    """Reads stdin line by line and writes answers to stdout; the first error ends the command."""

    def lines(self) -> Iterator[str]:
        yield from sys.stdin

    def answer(self, pieces: Generator[TextPiece]) -> None:
        for piece in pieces:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        sys.stdout.write("\n")

    def failed(self, error: LlmconvError) -> None:
        raise error

    def note(self, text: str) -> None:
        say(text)


class JsonLines(Pipe):
    """A pipe with one JSON object per answer: `text`, number of `tokens`, and `finish`."""

    def answer(self, pieces: Generator[TextPiece]) -> None:
        """Writes one line when the answer is complete."""
        whole = list(pieces)
        text = "".join(piece.text for piece in whole)
        count = sum(piece.token is not None for piece in whole)
        finish = whole[-1].finish if whole else ""
        print(json.dumps({"text": text, "tokens": count, "finish": finish}), flush=True)


class Terminal:
    """An interactive terminal with a prompt and colors, where Ctrl-C only stops the answer."""

    def __init__(self, name: str) -> None:
        import readline  # noqa: F401 - adds line editing and history

        from rich.console import Console

        self._console = Console(highlight=False)
        self._console.print(f"{printable(name)}. {COMMANDS}.", style="dim", markup=False)

    def lines(self) -> Iterator[str]:
        while True:
            try:
                yield self._console.input("[bold green]>[/] ")
            except Terminated:
                raise
            except KeyboardInterrupt:
                self.note("\nCtrl-D or /quit exits")
            except EOFError:
                self._console.print()
                return

    def answer(self, pieces: Generator[TextPiece]) -> None:
        """Writes the text as it is generated, then the number of tokens; Ctrl-C stops it."""
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
        words = {"stopped": ", stopped", "length": ", cut off at the length limit"}.get(finish, "")
        rate = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 else ""
        self.note(f"{count} tokens{rate}{words}")

    def failed(self, error: LlmconvError) -> None:
        """Shows the error; the chat continues unchanged."""
        self._console.print(f"error: {error.message}", style="red", markup=False)
        self._console.print(f"hint: {error.hint}, or /reset", style="dim", markup=False)

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


def visible(text: str) -> str:
    """`text` with control characters replaced, since escape sequences could control the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in text)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C adds to the list instead of interrupting a step; pressed twice, it interrupts."""
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
