"""TokenSample: the tokens on which the loss of accuracy is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmconv.checkpoint import read_small
from llmconv.errors import InputRefused, LlmconvError
from llmconv.runtime.tokenizer import first_ids, load_tokenizer
from llmconv.sample_texts import evaluation_text
from llmconv.tensors import Array
from llmconv.verify.results.quantization import OWN_TEXT, RANDOM, TEXT
from llmconv.verify.scenarios.calls import ModelFacts

SEED = 992720280
"""Seed of the random tokens; fixed, so that figures of different versions can be compared."""
PIECE = {"quick": 256, "full": 1024}
"""Maximum number of tokens per piece."""
TOKENS = {"quick": 1024, "full": 16384}
"""Maximum total number of tokens."""
DISTINCT = 32
"""Minimum number of distinct tokens of a text; a tokenizer that does not know its characters makes fewer."""


@dataclass(frozen=True)
class TokenSample:
    """The tokens of a comparison.

    Attributes:
        pieces: token ids, int64 `[1, tokens]` each.
        source: `text` of the user, `evaluation text` of llmconv, or `random tokens`.
    """

    pieces: Sequence[Array]
    source: str

    @property
    def is_text(self) -> bool:
        """Whether the tokens are a text, which has a perplexity."""
        return self.source != RANDOM


def token_sample(
    text: Path | None, folder: Path, facts: ModelFacts, suite: str, trust_remote_code: bool = False
) -> TokenSample:
    """The tokens of the beginning of a text.

    Args:
        text: a text file; None for the evaluation text of llmconv, or random tokens with a fixed seed if the folder has
            no tokenizer that knows its words.
        folder: folder of the model with its tokenizer.
        facts: sizes of the model.
        suite: `quick` or `full`.
        trust_remote_code: whether custom code of the tokenizer may run.

    Raises:
        InputRefused: the file is not a text or too short, or the folder has no matching tokenizer.
    """
    length = min(PIECE[suite], facts.max_positions or PIECE[suite])
    if text is None:
        return _own_sample(folder, facts, length, TOKENS[suite], trust_remote_code)
    pieces = _pieces(_encoded(_content(text), folder, trust_remote_code, TOKENS[suite]), length)
    if not pieces:
        raise InputRefused(f"`{text}` has less than two tokens", hint="give a text of some pages")
    if int(max(piece.max() for piece in pieces)) >= facts.vocab_size:
        raise InputRefused(
            f"the tokenizer of `{folder}` has more tokens than the model", hint="copy the model's tokenizer"
        )
    return TokenSample(pieces, TEXT)


def _own_sample(folder: Path, facts: ModelFacts, length: int, count: int, trusted: bool) -> TokenSample:
    try:
        ids = _encoded(evaluation_text(), folder, trusted, count)
    except LlmconvError:
        ids = []
    if len(set(ids)) >= DISTINCT and max(ids) < facts.vocab_size:
        return TokenSample(_pieces(ids, length), OWN_TEXT)
    rng = np.random.default_rng(SEED)
    return TokenSample([rng.integers(0, facts.vocab_size, (1, length)) for _ in range(count // length)], RANDOM)


def _pieces(ids: Sequence[int], length: int) -> list[Array]:
    pieces = [np.array([ids[start : start + length]], dtype=np.int64) for start in range(0, len(ids), length)]
    return [piece for piece in pieces if piece.shape[1] > 1]


def _content(text: Path) -> str:
    try:
        return read_small(text).decode()
    except OSError as error:
        raise InputRefused(f"cannot read `{text}`: {error.strerror}", hint="`--text` takes a file") from error
    except UnicodeDecodeError as error:
        raise InputRefused(f"`{text}` is not UTF-8 text", hint="`--text` takes a plain text file") from error


def _encoded(content: str, folder: Path, trust_remote_code: bool, most: int) -> list[int]:
    return first_ids(load_tokenizer(folder, trust_remote_code), content, most)
