"""CalibrationText: the text on which the importance of columns is measured."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmconv.checkpoint import read_small
from llmconv.errors import InputRefused
from llmconv.runtime.context_length import language_config
from llmconv.runtime.tokenizer import first_ids, load_tokenizer
from llmconv.sample_texts import DEFAULT, calibration_text, is_default
from llmconv.tensors import Array

TOKENS, PIECE, LEAST = 4096, 512, 256
"""Tokens of the text that are used, per call, and at least. More than 4,096 tokens gain little."""

LONG, TEXT_BYTES = 1 << 20, 64 << 20
"""Tokens that are used where every token counts, and maximum size of a text file."""

HINT = "`--calibrate` takes a plain text file, or the word `default` for the text that ships with llmconv"


@dataclass(frozen=True)
class CalibrationText:
    """A plain text; `name` is that of its file, or `default`."""

    name: str
    content: str

    @classmethod
    def read(cls, path: str | Path) -> CalibrationText:
        """The text of a file; for the word `default`, the one that ships with llmconv.

        Raises InputRefused if it cannot be read or is not UTF-8, UsageProblem if there is a file named `default`.
        """
        if is_default(path):
            return cls.shipped()
        if Path(path).is_dir():
            raise InputRefused(f"`{path}` is a folder", hint=HINT)
        try:
            return cls(Path(path).name, read_small(Path(path), TEXT_BYTES).decode())
        except OSError as error:
            raise InputRefused(f"cannot read `{path}`: {error.strerror}", hint=HINT) from error
        except UnicodeDecodeError as error:
            raise InputRefused(f"`{path}` is not UTF-8 text", hint=HINT) from error

    @classmethod
    def shipped(cls) -> CalibrationText:
        """The text that ships with llmconv."""
        return cls(DEFAULT, calibration_text())

    @property
    def sha256(self) -> str:
        """Of the text."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    def tokens(
        self, folder: Path, context: int | None, *, trust_remote_code: bool = False, most: int = TOKENS
    ) -> list[Array]:
        """Its first `most` token ids, int64 [1, tokens] each, at most `context` (None if unknown) tokens per call.

        Raises InputRefused if the folder has no tokenizer, or the text is too short.
        """
        tokenizer = load_tokenizer(folder, trust_remote_code)
        if not self.content.strip():
            raise InputRefused(f"`{self.name}` is empty", hint=HINT)
        ids = np.array(first_ids(tokenizer, self.content, most), dtype=np.int64)
        if len(ids) < LEAST:
            raise InputRefused(
                f"`{self.name}` is too short to measure anything: {len(ids)} tokens",
                hint=f"give a text of some pages: {LEAST} tokens at least, {most:,} are used",
            )
        size = min(PIECE, context or PIECE)
        pieces = [ids[None, start : start + size] for start in range(0, len(ids), size)]
        return [piece for piece in pieces if piece.shape[1] > 1]


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def random_prompts(tokens: Sequence[int], batch: int, length: int) -> list[list[int]]:
    """Random prompts [batch, length], chosen from `tokens` with a fixed seed."""
    found: list[list[int]] = np.random.default_rng([batch, length]).choice(tokens, (batch, length)).tolist()
    return found


def usable_tokens(folder: Path) -> list[int]:
    """All tokens of a model's vocabulary except special ones; raises InputRefused without a `vocab_size`."""
    config = language_config(folder)
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise InputRefused(f"`{folder}` has no config.json with a vocab_size", hint="copy the model's config.json")
    values = [config.get(name) for name in SPECIAL]
    special = {token for value in values for token in (value if isinstance(value, list) else [value])}
    return [token for token in range(size) if token not in special] or list(range(size))
