"""Row: one sequence of a batch while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from llmconv.errors import UsageProblem
from llmconv.generation.sampling.filters import pick_choice, pick_scored, pick_token
from llmconv.generation.sampling.settings import GenerationSettings
from llmconv.generation.streaming import StopStrings, TextStream
from llmconv.runtime.given_inputs import GivenInputs
from llmconv.runtime.placed_embeddings import PromptEmbeddings
from llmconv.runtime.runner import Step
from llmconv.tensors import Array


class RowStart(NamedTuple):
    """What a row begins with.

    Attributes:
        prompt: token ids.
        limit: maximum number of new tokens.
        sample: number of the random generator; of a beam search, the rank of the beam.
        embeddings: embeddings in place of those of some tokens of the prompt; None for none.
        inputs: values of the model's extra inputs; None for their defaults.
    """

    prompt: Sequence[int]
    limit: int
    sample: int = 0
    embeddings: PromptEmbeddings | None = None
    inputs: GivenInputs | None = None


def row_starts(
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    samples: Sequence[int],
    embeddings: Sequence[PromptEmbeddings | None],
    inputs: Sequence[GivenInputs | None],
) -> list[RowStart]:
    """What the rows of a batch begin with.

    Args:
        prompts: token ids.
        limits: maximum number of new tokens of each.
        samples: number of the random generator of each; empty for 0.
        embeddings: of each; empty for none.
        inputs: values of extra inputs of each.

    Raises:
        UsageProblem: more or fewer samples than prompts.
    """
    samples = samples or [0] * len(prompts)
    if len(samples) != len(prompts):
        raise UsageProblem(f"{len(samples)} samples for {len(prompts)} prompts", hint="give one number per prompt")
    return list(map(RowStart, prompts, limits, samples, embeddings or [None] * len(prompts), inputs))


def refuse_shifted(prompts: Sequence[Sequence[int]], most: int | None, virtual_tokens: int) -> None:
    """Refuses a batch after a tuned prefix whose window padding would shift.

    Args:
        prompts: token ids.
        most: maximum number of prompts in a batch; None for any.
        virtual_tokens: number of tokens of the prefix.

    Raises:
        UsageProblem: there are several prompts, a prefix, and room for one.
    """
    if len(prompts) > 1 == most and virtual_tokens:
        raise UsageProblem(
            "in a batch, padding would shift the window of this model's attention away from the tuned prefix",
            hint="give one prompt at a time",
        )


@dataclass(frozen=True)
class TextPiece:
    """A piece of one text: what one new token adds to it.

    Attributes:
        index: index of the prompt.
        text: new text that is final; empty while a character or a stop string may be incomplete.
        token: the new token, or the end token; None if no token was generated.
        finish: why this is the last piece: `eos`, `length` or `stop`; or `too_long`; empty if it is not.
    """

    index: int
    text: str
    token: int | None
    finish: str


class Row:
    """The tokens of one prompt and the new tokens after it.

    Args:
        index: index of the prompt.
        start: its token ids, and the room for new ones.
        settings: how new tokens are picked.
        decode: tokens to text.
        processor: tokens [length] and logits [vocabulary] to scores [vocabulary]; None for llmconv's own filters.
    """

    def __init__(
        self,
        index: int,
        start: RowStart,
        settings: GenerationSettings,
        decode: Callable[[Sequence[int]], str],
        processor: Callable[[Array, Array], Array] | None = None,
    ) -> None:
        self.index, self.prompt, self.settings = index, list(start.prompt), settings
        self.room, self.sample = start.limit, start.sample
        self._processor, self.embeddings = processor, start.embeddings
        self._before = self.embeddings.before if self.embeddings else 0
        self._generator = np.random.default_rng(settings.seed_of(start.sample))
        self._text, self._stops = TextStream(decode), StopStrings(settings.stop_strings)
        # texts of special tokens, which are not in the text, but may be part of a stop string
        self._special = _named(getattr(decode, "special_texts", {}), settings.stop_strings)
        self.inputs = start.inputs or GivenInputs(len(self.prompt))
        if self.embeddings and self.embeddings.inputs:
            self.inputs = replace(self.inputs, values={**self.embeddings.inputs, **self.inputs.values})
        self.length = len(self.prompt)
        self._ids = np.empty(self.length + min(self.room, 1024), dtype=np.int64)
        self._ids[: self.length] = self.prompt
        self.finish = "" if self.room else "length"

    @property
    def ids(self) -> Array:
        """Tokens of the prompt and new tokens, int64 [length], without embeddings that stand for no token."""
        return self._ids[self._before : self.length]

    @property
    def all_ids(self) -> Array:
        """As `ids`, with those that stand for embeddings."""
        return self._ids[: self.length]

    @property
    def last(self) -> int:
        """The latest token."""
        return int(self._ids[self.length - 1])

    def advance(self, step: Step, at: int) -> TextPiece:
        """Picks the next token from row `at` of the last position of the step."""
        return self.push(self._pick(step, at))

    def push(self, token: int, is_last: bool = False) -> TextPiece:
        """Appends `token`, the last one of the sequence if `is_last`, and returns the text that is final now."""
        if self.length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self.length] = token
        self.length += 1
        self.room -= 1
        ended = token in self.settings.eos_token_id
        text = "" if ended else self._stops.push(self._text.push(token))
        if token in self._special:
            text += self._stops.push(self._text.close()) if ended else ""
            text += self._stops.push(self._special[token], shown=False)
        self.finish = "eos" if ended else "stop" if self._stops.found else "" if self.room and not is_last else "length"
        return TextPiece(self.index, text + self.rest(), token, self.finish)

    def rest(self) -> str:
        """The text that was held back, at the end of the sequence; may contain a stop string."""
        if not self.finish or self._stops.found:
            return ""
        text = self._stops.push(self._text.close())
        if self._stops.found:
            self.finish = "stop"
            return text
        return text + self._stops.close()

    def _pick(self, step: Step, at: int) -> int:
        settings, generator = self.settings, self._generator
        if step.choices is not None:
            if self._processor or settings.repetition_penalty != 1:
                raise UsageProblem(
                    "penalties need all logits, but the graph returns only the tokens that it chose",
                    hint="give `--repetition-penalty 1`, or export without `--postprocess`",
                )
            return pick_choice(step.choices.tokens[at, -1], step.choices.scores[at, -1], settings, generator)
        logits = step.logits[at, -1]
        if self._processor:
            return pick_scored(self._processor(self.ids, logits), settings, generator)
        return pick_token(logits, settings, generator, self.ids if settings.repetition_penalty != 1 else None)


def _named(special: Mapping[int, str], stops: Sequence[str]) -> dict[int, str]:
    """The special tokens whose whole text is part of a stop string."""
    return {token: text for token, text in special.items() if any(text in stop for stop in stops)} if stops else {}


def pieces_of(row: Row, tokens: Sequence[int]) -> Iterator[TextPiece]:
    """The pieces of a row whose tokens are all known, up to a stop string.

    Args:
        row: has no new tokens yet.
        tokens: all new tokens.
    """
    for token in tokens:
        piece = row.push(token)
        yield piece
        if piece.finish:
            break
    if not row.finish or not tokens:
        row.finish = "length"
        yield TextPiece(row.index, row.rest(), None, row.finish)
