"""Batches: the texts of a run, one batch at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmconv.generation.chat.reused_cache import SharedPrefix
from llmconv.generation.completions import TOO_LONG, Completion
from llmconv.generation.cost import GenerationCost, Meter
from llmconv.generation.model import TextModel
from llmconv.generation.prompts import shared_start
from llmconv.generation.row import TextPiece
from llmconv.generation.sampling.settings import GenerationSettings
from llmconv.generation.wording import PlannedText

OnPiece = Callable[[TextPiece], object]


class TimedDecoder:
    """Decodes tokens to text, and adds up the seconds that it took."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self.seconds = decode, 0.0
        self.special_texts: Mapping[int, str] = getattr(decode, "special_texts", {})

    def __call__(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        started = time.perf_counter()
        text = self._decode(tokens)
        self.seconds += time.perf_counter() - started
        return text


@dataclass
class _GrowingText:
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: str = ""

    def add(self, piece: TextPiece) -> None:
        self.text.append(piece.text)
        self.finish = piece.finish
        if piece.token is not None and piece.finish != "eos":
            self.tokens.append(piece.token)


@dataclass(frozen=True)
class Batches:
    """Runs texts in batches of at most `size`, fewer if the graphs are smaller.

    `shares`: the prompts have a common start that is run only once. `together` texts, the beams of a prompt, are not
    divided. With a `streamer` of transformers, texts run one by one.
    """

    model: TextModel
    settings: GenerationSettings
    size: int
    shares: bool = False
    together: int = 1
    streamer: object = None

    def run(
        self, prompts: Sequence[PlannedText], skip: int = 0, on_piece: OnPiece | None = None
    ) -> Iterator[tuple[list[Completion], GenerationCost]]:
        """Yields the completions and the cost of each batch; `on_piece` is called with every piece of text.

        The first `skip` prompts are finished already; those with a problem are completed without being run.
        """
        ids = [prompt.tokens for prompt in prompts if not prompt.problem]
        shares = self.shares and len(ids) > 1 and not any(prompt.embeddings or prompt.inputs for prompt in prompts)
        shared = SharedPrefix(shared_start(ids), self.model.positions) if shares else None
        size = min(self.size, self.model.sequences or self.size)
        size = max(size // self.together, 1) * self.together
        size = 1 if self.streamer else size
        for start in range(skip, len(prompts), size):
            yield self._run_one(prompts[start : start + size], shared, _numbered(on_piece, start))

    def _run_one(
        self, prompts: Sequence[PlannedText], shared: SharedPrefix | None, on_piece: OnPiece | None
    ) -> tuple[list[Completion], GenerationCost]:
        places = [at for at, prompt in enumerate(prompts) if not prompt.problem]
        fitting = [prompts[at] for at in places]
        growing = [_GrowingText(finish=TOO_LONG) for _ in prompts]
        for at in (at for at, prompt in enumerate(prompts) if prompt.problem and on_piece):
            assert on_piece
            on_piece(TextPiece(at, "", None, TOO_LONG))
        meter = Meter([len(one.tokens) for one in fitting], at_once=self.settings.num_beams > 1)
        decode = TimedDecoder(self.model.decode)
        for piece in self._pieces(fitting, shared, decode):
            growing[places[piece.index]].add(piece)
            if piece.token is not None:
                meter.count(piece.index)
            if on_piece:
                on_piece(TextPiece(places[piece.index], piece.text, piece.token, piece.finish))
        cost = meter.stop(decode.seconds)
        seconds = dict(zip(places, cost.latencies, strict=True))
        made = [_completion(*one, seconds.get(at, 0.0)) for at, one in enumerate(zip(prompts, growing, strict=True))]
        return made, cost

    def _pieces(
        self, prompts: Sequence[PlannedText], shared: SharedPrefix | None, decode: TimedDecoder
    ) -> Iterator[TextPiece]:
        if not prompts:
            return iter(())
        ids, samples = [one.tokens for one in prompts], [one.sample for one in prompts]
        rows = [one.embeddings() if one.embeddings else None for one in prompts]
        given: dict[str, Any] = {"samples": samples, "decode": decode, "streamer": self.streamer}
        if any(one.inputs for one in prompts):
            given["inputs"] = [one.inputs for one in prompts]
        return self.model.stream(ids, self.settings, shared, embeddings=rows, **given)


def _completion(prompt: PlannedText, made: _GrowingText, seconds: float) -> Completion:
    text, read = "".join(made.text), len(prompt.tokens)
    return Completion(prompt.content, text, made.tokens, read, made.finish, prompt.sequence, prompt.cut_tokens, seconds)


def _numbered(on_piece: OnPiece | None, start: int) -> OnPiece | None:
    """`on_piece`, with the index of the text among all texts, not in its batch."""
    if on_piece is None or start == 0:
        return on_piece
    return lambda piece: on_piece(TextPiece(start + piece.index, piece.text, piece.token, piece.finish))
