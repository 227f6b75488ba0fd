"""Random prompts of tokens that mean nothing special to the model, the same in every run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmconv.errors import InputRefused
from llmconv.runtime.context_length import language_config

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
