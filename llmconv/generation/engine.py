"""LoopEngine: llmconv's own loop over the graphs or the eager model; `genai` has the engine of ONNX Runtime GenAI."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmconv.generation.loop import Batch, PrefixCache, grow
from llmconv.generation.row import PositionRule, Row, RowStart, TextPiece
from llmconv.generation.sampling import GenerationSettings
from llmconv.runtime.extra_inputs import GivenInputs
from llmconv.runtime.runner import Runner

Decode = Callable[[Sequence[int]], str]
"""Tokens to text."""


@dataclass(frozen=True)
class LoopEngine:
    """llmconv's own loop: a prefill, then one step of the model (graphs or eager) per token.

    Attributes:
        folder: has `config.json`, read for the size of the logits in a beam search.
        runs_last_token: whether the last new token also needs room in the context.
    """

    runner: Runner
    positions: PositionRule
    folder: Path
    runs_last_token = False

    def grow(
        self,
        starts: Sequence[RowStart],
        settings: GenerationSettings,
        decode: Decode,
        cache: PrefixCache | None = None,
        most: int = 0,
    ) -> Generator[TextPiece]:
        """Continues a batch by greedy search or sampling, after the `cache` of `TextModel.stream`.

        `most` is the maximum number of prompt tokens per step; 0 for all.
        """
        longest = max((len(start.prompt) + start.limit for start in starts), default=0)
        if len(starts) > 1 and not self.runner.reads_in_parts(longest):  # a longer one would change the others
            for index, start in enumerate(starts):
                for piece in self.grow([start], settings, decode, None, most):
                    yield replace(piece, index=index)
            return
        rows = [self._row(index, start, settings, decode) for index, start in enumerate(starts)]
        yield from (TextPiece(row.index, "", None, row.finish) for row in rows if row.finish)
        batch = Batch(self.runner, rows, self.positions)
        if not batch.rows:
            return
        is_whole = False
        try:
            past = cache.past([row.prompt for row in batch.rows], self.runner) if cache else None
            for piece in grow(batch, past, most):
                is_whole = True
                yield piece
                is_whole = False
            is_whole = True
        finally:  # an interrupted step may have left the cache half written
            if cache and len(rows) == 1:
                cache.keep(*((rows[0].ids[: batch.past.tokens], batch.past.cache) if is_whole and batch.past else ()))

    def beams(
        self,
        prompt: Sequence[int],
        limit: int,
        settings: GenerationSettings,
        count: int,
        inputs: GivenInputs | None = None,
    ) -> Sequence[list[int]]:
        """The at most `limit` new tokens of each of the `count` best beams of a prompt, best first, by transformers."""
        if not limit:
            return [[]] * count
        from transformers import AutoConfig  # noqa: PLC0415 - takes seconds, and only beams need it

        from llmconv.generation.logits_processors import (  # noqa: PLC0415 - imports torch
            GraphModel,
            search,
        )

        config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        vocabulary = int(config.get_text_config(decoder=True).vocab_size)
        return search(GraphModel(self.runner, self.positions, vocabulary, inputs), prompt, limit, settings, count)

    @staticmethod
    def _row(index: int, start: RowStart, settings: GenerationSettings, decode: Decode) -> Row:
        if not settings.needs_processors:
            return Row(index, start, settings, decode)
        from llmconv.generation.logits_processors import processor  # noqa: PLC0415 - imports torch

        tokens = len(start.prompt) - (start.embeddings.before if start.embeddings else 0)
        return Row(index, start, settings, decode, processor(settings, tokens, start.limit))
