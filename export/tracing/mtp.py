"""The layer of an MTP head as a decoder: transformers' `MtpModel`, with the inputs of a graph.

For each position it takes the hidden state of the model (after its last norm) and the next token, and predicts the
token after that. Embeddings and output head are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_causal_mask
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from llmconv.causal_lm import mtp_tensors
from llmconv.errors import InputRefused, UnsupportedInput, first_line
from llmconv.progress import say


class MtpHead(MtpModel):  # type: ignore[misc]
    """The first layer of the MTP head of `main`; `conversions` make its parameters of the checkpoint's tensors."""

    def __init__(self, main: PreTrainedModel) -> None:
        super().__init__(main, 1)
        head = WeightRenaming(source_patterns=r"^lm_head\.", target_patterns="shared_head.")
        self.conversions = [head, *self.get_weight_conversions(main)]
        tied = getattr(main.config.get_text_config(), "tie_word_embeddings", False)
        self.all_tied_weights_keys = {"shared_head.weight": "embed_tokens.weight"} if tied else {}

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: transformers' conversions of `MtpModel` apply."""
        return False

    def forward(
        self,
        input_ids: Tensor,  # int64 [batch, tokens], those after the hidden states
        attention_mask: Tensor,  # int64 [batch, past + tokens]
        position_ids: Tensor | None = None,  # int64 [batch, tokens], of these tokens
        past_key_values: Any = None,
        previous_hidden_state: Tensor | None = None,  # [batch, tokens, hidden]
        use_cache: bool = True,
        output_hidden_states: bool = True,
    ) -> CausalLMOutputWithPast:
        """Logits of the token after each of `input_ids`, and the hidden state that they are computed from."""
        self._attention_mask = attention_mask
        if position_ids is None:
            position_ids = (attention_mask.cumsum(dim=1))[:, -input_ids.shape[1] :]
        hidden = self.forward_layer(0, previous_hidden_state, position_ids, past_key_values, input_ids=input_ids)
        return CausalLMOutputWithPast(logits=self._project_to_logits(hidden), hidden_states=(hidden,))

    def create_masks_for_mtp_layer(
        self, layer_idx: int, inputs_embeds: Tensor, mtp_cache: Any, position_ids: Tensor
    ) -> dict[str, Any]:
        """The mask of the layer, which transformers' own makes for a single text alone."""
        kinds = getattr(self.config, "layer_types", None)
        make: Any = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[kinds[0]] if kinds else create_causal_mask
        given = {"past_key_values": mtp_cache, "position_ids": position_ids, "attention_mask": self._attention_mask}
        return {"attention_mask": make(config=self.config, inputs_embeds=inputs_embeds, **given)}


MtpHead.__name__ = MtpModel.__name__  # transformers looks up its conversions by it


def head_of(config: Any, names: Iterable[str]) -> tuple[str, ...]:
    """The tensors that the graph of the MTP head may need, of a checkpoint with a transformers config and these names.

    Raises InputRefused: it has no such head; UnsupportedInput: transformers has no code that computes it.
    """
    text, names = config.get_text_config(decoder=True), list(names)
    if not (found := mtp_tensors(names, text.to_dict())):
        raise InputRefused("`--mtp`: the checkpoint has no MTP head", hint="export without `--mtp`")
    hint = "export without `--mtp`: the tensors of the head are kept as they are"
    try:
        layers = text.get_mtp_config().num_hidden_layers
    except (ValueError, AttributeError) as error:
        problem = (
            f"`--mtp`: transformers does not compute the MTP head of `{text.model_type}`: {first_line(error, 120)}"
        )
        raise UnsupportedInput(problem, hint=hint) from error
    if not layers:
        raise InputRefused("`--mtp`: `config.json` declares no MTP layer (`num_nextn_predict_layers`)", hint=hint)
    if layers > 1:
        say(f"the MTP head has {layers} layers; `mtp.onnx` is the first")
    return (*found, "model.embed_tokens.weight", "lm_head.weight")
