"""Text models that transformers has only as a part of a model with images: here with a head for tokens.

Their parameters have the names of other language models, `model.layers…` and `lm_head.weight`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.modeling_outputs import CausalLMOutputWithPast

from llmconv.runtime.eager.runner import added_after_layers


class TextWithHead(PreTrainedModel):  # type: ignore[misc]
    """A text model and its head."""

    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_attention_backend = True
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        deepstack_embeds: Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits of all tokens, and the cache.

        Args:
            input_ids: int64 `[batch, tokens]`; or `inputs_embeds`.
            attention_mask: int64 `[batch, past + tokens]`.
            position_ids: int64 `[3, batch, tokens]`.
            inputs_embeds: `[batch, tokens, hidden]`.
            deepstack_embeds: features of images that are added to the outputs of the first layers,
                `[batch, tokens, layers * hidden]`; None for none.
        """
        with added_after_layers(self.model.layers, deepstack_embeds):
            found = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
            )
        logits = self.lm_head(found.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)


TEXT_MODELS = frozenset({"qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text"})
"""Types of text models, by `model_type` of their config, that transformers has without a head."""


def conversions_of(model: PreTrainedModel) -> list[Any]:
    """How checkpoint tensors become parameters of a model; of a text model also what the whole one declares."""
    own: list[Any] = get_model_conversion_mapping(model)
    whole = str(model.config.model_type).removesuffix("_text")
    declared = get_checkpoint_conversion_mapping(whole) if isinstance(model, TextWithHead) else None
    return own + [one for one in declared or () if isinstance(one, WeightConverter)]
