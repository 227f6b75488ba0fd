"""Which embeddings a model reads: placeholders are embedded as padding, and some models embed tokens in every layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmconv.tensors import Array

EMBEDDED_AS_PADDING = {"gemma4": ("image_token_id", "video_token_id", "audio_token_id")}
"""By `model_type`: fields of the config with the tokens that are embedded as padding until features replace them."""


def embeds_in_layers(config: Any) -> bool:
    """Whether every layer also embeds the tokens, so that embeddings cannot stand in for them.

    Args:
        config: a transformers config.
    """
    return bool(getattr(config.get_text_config(decoder=True), "hidden_size_per_layer_input", None))


def placeholders(config: Any) -> tuple[int, ...]:
    """The tokens that a model embeds as padding; none for most.

    Args:
        config: the whole model's transformers config.
    """
    found = (getattr(config, name, None) for name in EMBEDDED_AS_PADDING.get(config.model_type, ()))
    return tuple(token for token in found if token is not None)


def as_embedded(input_ids: Array, config: Any) -> Array:
    """The tokens whose embeddings the model reads, int64 [batch, tokens].

    Args:
        input_ids: int64 [batch, tokens].
        config: the whole model's transformers config.
    """
    tokens = placeholders(config)
    if not tokens:
        return input_ids
    padding = config.get_text_config(decoder=True).pad_token_id
    return np.where(np.isin(input_ids, tokens), padding, input_ids)
