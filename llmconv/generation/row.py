"""Row: one sequence while it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmconv.generation.sampling import pick_choice, pick_token
from llmconv.generation.settings import GenerationSettings
from llmconv.generation.streaming import StopStrings, TextStream
from llmconv.runtime.runner import Step


@dataclass(frozen=True)
class Piece:
    """What one token adds to one text.

    Attributes:
        index: of the prompt.
        text: that became certain; empty while a character or a stop string may be incomplete.
        token: the new token, an end token too; None where there was no room for any.
        finish: empty, or why this is the last piece: `eos`, `length` or `stop`.
    """

    index: int
    text: str
    token: int | None
    finish: str


class Row:
    """The tokens of one prompt and of what follows it.

    Args:
        index: of the prompt.
        prompt: its tokens.
        limit: how many may follow.
        settings: how they are picked.
        decode: tokens to text.
        included: a stop string is part of the text.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        limit: int,
        settings: GenerationSettings,
        decode: Callable[[Sequence[int]], str],
        included: bool = False,
    ) -> None:
        self.index, self.prompt, self.settings = index, list(prompt), settings
        self._left = limit
        self._generator = np.random.default_rng(settings.seed)
        self._text, self._stops = TextStream(decode), StopStrings(settings.stop_strings, included)
        self.ids = np.empty(len(prompt) + limit, dtype=np.int64)
        self.ids[: len(prompt)] = prompt
        self.length = len(prompt)
        self.finish = "" if limit else "length"

    @property
    def room(self) -> int:
        """How many tokens may still follow."""
        return self._left

    @property
    def last(self) -> int:
        """The latest token."""
        return int(self.ids[self.length - 1])

    def advance(self, step: Step, at: int) -> Piece:
        """Takes the next token from row `at` of the step's last position."""
        return self.push(self._pick(step, at))

    def push(self, token: int) -> Piece:
        """Takes `token`, and gives the text that is certain now."""
        self.ids[self.length] = token
        self.length += 1
        self._left -= 1
        ended = token in self.settings.eos_token_id
        text = "" if ended else self._stops.push(self._text.push(token))
        self.finish = "eos" if ended else "stop" if self._stops.found else "" if self._left else "length"
        return Piece(self.index, text + self._rest(), token, self.finish)

    def _rest(self) -> str:
        """What is held back at the end; it may still hold a stop string."""
        if not self.finish or self._stops.found:
            return ""
        text = self._stops.push(self._text.close())
        if self._stops.found:
            self.finish = "stop"
            return text
        return text + self._stops.close()

    def _pick(self, step: Step, at: int) -> int:
        if step.choices is not None:
            tokens, scores = step.choices.tokens[at, -1], step.choices.scores[at, -1]
            return pick_choice(tokens, scores, self.settings, self._generator)
        seen = self.ids[: self.length] if self.settings.repetition_penalty != 1 else None
        return pick_token(step.logits[at, -1], self.settings, self._generator, seen)
