"""TextPrinter: generated texts on stdout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmconv.generation import TextPiece
    from llmconv.generation.prompt_run import PromptRun
    from llmconv.generation.streaming import OrderedWriter


class TextPrinter:
    """Prints texts on stdout in order; several of them have headings.

    Args:
        run: has their number, and that of those finished before.
        null: end each text with a NUL character, and print no headings.
    """

    def __init__(self, run: PromptRun, *, null: bool = False) -> None:
        self._run, self._null = run, null
        self._writer: OrderedWriter | None = None

    def on_piece(self, piece: TextPiece) -> None:
        """Prints a piece, or keeps it until the texts before it are finished."""
        self.push(piece.index, piece.text, done=bool(piece.finish))

    def push(self, index: int, text: str, *, done: bool) -> None:
        """Prints more of one text.

        Args:
            index: of the text.
            text: what is new.
            done: it is the end of the text.
        """
        from llmconv.generation.streaming import OrderedWriter

        end = "\0" if self._null else "\n"
        if self._writer is None:
            self._writer = OrderedWriter(self._print, self._run.skipped, end, self._heading)
        self._writer.push(index, text, done)

    def _heading(self, index: int) -> str:
        """The line above a text; empty for a single text."""
        prompts, count = len(self._run.prompts), self._run.count
        if self._null or prompts * count == 1:
            return ""
        number, sequence = divmod(index, count)
        name = f"{number + 1} of {prompts}" + (f", text {sequence + 1} of {count}" if count > 1 else "")
        return f"==> {name} <==\n"

    @staticmethod
    def _print(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
