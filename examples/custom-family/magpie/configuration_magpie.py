"""MagpieConfig: the fields of a Magpie's `config.json`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class MagpieConfig(PreTrainedConfig):
    """A small decoder.

    Args:
        vocab_size: tokens.
        d_model: width of the hidden state.
        n_blocks: layers.
        n_heads: query heads; keys and values have one.
        n_versions: versions of the rhyme that it knows.
    """

    model_type = "magpie"
    attribute_map = {"hidden_size": "d_model", "num_hidden_layers": "n_blocks", "num_attention_heads": "n_heads"}

    def __init__(
        self,
        vocab_size: int = 257,
        d_model: int = 64,
        n_blocks: int = 6,
        n_heads: int = 4,
        n_versions: int = 2,
        **others: Any,
    ) -> None:
        self.vocab_size, self.d_model, self.n_blocks, self.n_heads = vocab_size, d_model, n_blocks, n_heads
        self.n_versions = n_versions
        super().__init__(**others)
