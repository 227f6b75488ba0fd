"""Spice: a Llama with inputs of every kind: a language per sequence, features per token, weights of all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from llmconv.export import BATCH, SEQUENCE, TOTAL, ExtraInput, InputMap, ModelCall
from llmconv.tensors import Array
from tests.conftest import CONFIGS

LANGUAGES = 3


class SpiceConfig(LlamaConfig):  # type: ignore[misc]
    """A Llama's."""

    model_type = "spice"


class SpiceForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Adds to the embeddings what the other inputs say."""

    config_class = SpiceConfig

    def __init__(self, config: SpiceConfig) -> None:
        super().__init__(config)
        self.languages = nn.Embedding(LANGUAGES, config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        language: Tensor,
        position_ids: Tensor | None = None,
        features: Tensor | None = None,
        weights: Tensor | None = None,
        filled: Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits; `language` and `filled` `[batch]`, `features` `[batch, new, 2]`, `weights` `[batch, total]`.

        What counts all tokens scales the logits and not the embeddings, whose keys a cache keeps.
        """
        hidden = self.get_input_embeddings()(input_ids) + self.languages(language)[:, None]
        if features is not None:
            hidden = hidden + features.sum(-1, keepdim=True)
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        output = super().forward(inputs_embeds=hidden, **given, **others)
        for numbers in (weights, filled):
            if numbers is not None:
                total = numbers.reshape(numbers.shape[0], -1).sum(1).to(hidden.dtype)
                output.logits = output.logits * (1 + total / 64)[:, None, None]
        return output


AutoConfig.register("spice", SpiceConfig, exist_ok=True)
AutoModelForCausalLM.register(SpiceConfig, SpiceForCausalLM, exist_ok=True)


def count_tokens(call: ModelCall) -> Array:
    """The number of tokens of each row that are not padding."""
    counts: Array = call.attention_mask.sum(axis=1)
    return counts


LANGUAGE = ExtraInput("language", (BATCH,), values=LANGUAGES)
FEATURES = ExtraInput("features", (BATCH, SEQUENCE, 2), dtype="float32", values=0.5)
WEIGHTS = ExtraInput("weights", (BATCH, TOTAL), dtype="bool", values=2)
FILLED = ExtraInput("filled", (BATCH,), default=count_tokens)
SPICE = InputMap(extras=(LANGUAGE, FEATURES, WEIGHTS, FILLED))


def save_spice(folder: Path) -> Path:
    """Saves a seeded model of six layers, every weight random."""
    config = SpiceConfig(**{**CONFIGS["llama"], "num_hidden_layers": 6})
    torch.manual_seed(0)
    model = SpiceForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def wrong_shape(call: ModelCall) -> Array:
    """A hook whose result has one element too many."""
    return np.zeros(len(call.input_ids) + 1, dtype=np.int64)
