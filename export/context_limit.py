"""Checks the length of a static cache against the context length of the model."""

from __future__ import annotations

from typing import Any

from llmconv.errors import InputRefused
from llmconv.export.input_map import decoder_config
from llmconv.progress import warn


def check_context(config: Any, context: int | None, slots: int | None) -> None:
    """Checks that a static cache is not longer than the context; warns if only training ends there.

    A table of positions, learned or computed, ends at the context length. Rotary positions continue, but the model was
    not trained on them.

    Args:
        config: a transformers config.
        context: context length in tokens that `config.json` declares; None if it declares none.
        slots: number of tokens that the cache holds; None for a growing cache.

    Raises:
        InputRefused: the cache is longer than the model's table of positions.
    """
    config = decoder_config(config)
    if slots is None or context is None or slots <= context or getattr(config, "alibi", False):
        return
    problem = f"a cache of {slots:,} tokens is longer than the model's context of {context:,}"
    # Rotation angles have no limit; GPT-J and CodeGen look them up in a table.
    if not (getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        raise InputRefused(
            f"{problem}, and its table of positions ends there", hint=f"give `--max-seq-len {context}` or less"
        )
    warn(f"{problem} (`max_position_embeddings`): the model was not trained on positions beyond it")
