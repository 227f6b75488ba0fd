"""Text while it is generated: only complete characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns a growing list of tokens into pieces of text.

    A token may be part of a UTF-8 character, and its text may depend on the token before (a leading space). So each
    piece is the difference between two decodings of a short window, held back while it ends in an incomplete character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # the window
        self._shown = 0  # how many of them are already in the output
        self._text = ""  # the text of those

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(INCOMPLETE) or len(text) <= len(self._text):
            return ""
        piece = text[len(self._text) :]
        self._tokens = self._tokens[self._shown :]
        self._shown = len(self._tokens)
        self._text = self._decode(self._tokens)
        return piece

    def close(self) -> str:
        """The text that was held back; an incomplete character becomes U+FFFD."""
        piece = self._decode(self._tokens)[len(self._text) :]
        self._tokens, self._shown, self._text = [], 0, ""
        return piece


class StopStrings:
    """Passes text on up to the first stop string, which may span several pieces; ignores empty stop strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held, self._shown = "", b""  # the text, and for each of its characters whether it is passed on
        self.found = False

    def push(self, piece: str, shown: bool = True) -> str:
        """The text that cannot be part of a stop string; nothing after a stop string.

        A piece that is not `shown`, that of a special token, is only looked at.
        """
        if self.found or not self._stops:
            return piece if shown and not self.found else ""
        text, flags = self._held + piece, self._shown + bytes([shown]) * len(piece)
        start = min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=None)
        if start is not None:
            self.found, self._held, self._shown = True, "", b""
            return _shown(text[:start], flags)
        final = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held, self._shown = text[final:], flags[final:]
        return _shown(text[:final], flags)

    def close(self) -> str:
        """The text that was held back as a possible start of a stop string."""
        held, flags = self._held, self._shown
        self._held, self._shown = "", b""
        return _shown(held, flags)


def _shown(text: str, flags: bytes) -> str:
    """The characters whose flag is set."""
    return "".join(compress(text, flags))


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of `text` that may be the start of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0)


class OrderedWriter:
    """Writes texts in order from index `start`, each between `heading(index)` and `end`; the first one as it grows."""

    def __init__(
        self,
        write: Callable[[str], object],
        start: int = 0,
        end: str = "\n",
        heading: Callable[[int], str] = lambda index: "",
    ) -> None:
        self._write, self._end, self._heading = write, end, heading
        self._waiting: dict[int, str] = {}
        self._done: set[int] = set()
        self._current = start

    def push(self, index: int, piece: str, done: bool) -> None:
        """Adds a piece to text `index`; if it is the last (`done`), the end follows."""
        begun = self._waiting.get(index)
        self._waiting[index] = (self._heading(index) if begun is None else begun) + piece + self._end * done
        if done:
            self._done.add(index)
        while text := self._waiting.get(self._current):
            self._write(text)
            self._waiting[self._current] = ""
            if self._current not in self._done:
                return
            del self._waiting[self._current]
            self._current += 1
