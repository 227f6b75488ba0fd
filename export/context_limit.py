"""How many tokens a cache of fixed length may hold: the positions of a model reach no further than its context."""

from __future__ import annotations

from typing import Any

from llmconv.errors import InputRefused
from llmconv.export.input_maps import decoder_config
from llmconv.progress import warn


def check_context(config: Any, context: int | None, slots: int | None) -> None:
    """Compares the length of a static cache with the context of the model.

    A table of positions, learned or not, ends there. Rotary positions go on, but the model was not trained on them.

    Args:
        config: of transformers.
        context: tokens that `config.json` declares; None where it declares none.
        slots: tokens of the cache; None where it grows.

    Raises:
        InputRefused: there are no positions for so many tokens.
    """
    config = decoder_config(config)
    if slots is None or context is None or slots <= context or getattr(config, "alibi", False):
        return
    problem = f"a cache of {slots:,} tokens is longer than the model's context of {context:,}"
    if not _is_rotary(config):
        raise InputRefused(
            f"{problem}, and its table of positions ends there", hint=f"give `--max-seq-len {context}` or less"
        )
    warn(f"{problem} (`max_position_embeddings`): the model was not trained on positions beyond it")


def _is_rotary(config: Any) -> bool:
    """Whether positions are angles that any number has; GPT-J and CodeGen look theirs up in a table."""
    return bool(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
