"""Incremental detokenisation: text as it becomes certain, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns a growing list of tokens into pieces of text.

    Tokens may hold part of a UTF-8 character, and their text may depend on the one before (a leading space). So each
    piece is the difference of two decodings of the same short window, and it is held back while it ends in an
    incomplete character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = 0  # first token of the window
        self._shown = 0  # tokens whose text is out

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._tokens.append(token)
        before, after = self._window()
        if after.endswith(INCOMPLETE) or len(after) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def close(self) -> str:
        """What was held back; an incomplete character comes out as U+FFFD."""
        before, after = self._window()
        self._start = self._shown = len(self._tokens)
        return after[len(before) :]

    def _window(self) -> tuple[str, str]:
        shown = self._decode(self._tokens[self._start : self._shown])
        return shown, self._decode(self._tokens[self._start :])


class OrderedWriter:
    """Writes the texts of a batch one after another: the first unfinished one live, the others in turn."""

    def __init__(self, count: int, write: Callable[[str], object]) -> None:
        self._write = write
        self._waiting = [""] * count
        self._done = [False] * count
        self._current = 0

    def push(self, index: int, piece: str, done: bool) -> None:
        """Takes a piece of text `index`; a text ends with a line break."""
        self._waiting[index] += piece + ("\n" if done else "")
        self._done[index] = done
        while self._current < len(self._waiting) and self._waiting[self._current]:
            self._write(self._waiting[self._current])
            self._waiting[self._current] = ""
            self._current += self._done[self._current]
