"""Streamers of transformers, such as `TextStreamer`, fed from llmconv's own loop."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, TypeGuard

import numpy as np

from llmconv.errors import UsageProblem
from llmconv.files.paths import kind_of
from llmconv.generation.row import TextPiece
from llmconv.generation.sampling.settings import GenerationSettings


def is_streamer(value: Any) -> TypeGuard[Any]:
    """Whether an object has the methods of transformers' `BaseStreamer`."""
    return (
        not isinstance(value, type) and callable(getattr(value, "put", None)) and callable(getattr(value, "end", None))
    )


def require_streamer(streamer: Any, prompts: int, settings: GenerationSettings | None = None) -> None:
    """Raises UsageProblem if a streamer lacks a method, or for several texts or beams, which it cannot tell apart."""
    if not is_streamer(streamer):
        raise UsageProblem(
            f"`streamer` is {kind_of(streamer)}, not a streamer", hint="give `TextStreamer(tokenizer)` of transformers"
        )
    if prompts != 1:
        raise UsageProblem(f"a streamer takes one text at a time, not {prompts}", hint="give one prompt")
    if settings and settings.num_beams > 1:
        raise UsageProblem(
            "a streamer takes no beam search, whose text is known only at its end", hint="leave out `num_beams`"
        )


def feed(streamer: Any, prompt: Sequence[int], pieces: Generator[TextPiece]) -> Generator[TextPiece]:
    """Passes pieces on; gives the streamer the prompt's token ids, each new token, and the end, also after an error."""
    try:
        streamer.put(np.array([prompt], dtype=np.int64))
        with closing(pieces):
            for piece in pieces:
                if piece.token is not None:
                    streamer.put(np.array([piece.token], dtype=np.int64))
                yield piece
    finally:
        streamer.end()
