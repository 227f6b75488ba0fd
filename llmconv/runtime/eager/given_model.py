"""GivenModel: a model of transformers that is in memory already, run as it is."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from llmconv.argument_checks import require_threads
from llmconv.errors import UsageProblem
from llmconv.files.paths import kind_of
from llmconv.runtime.context_length import length_of, length_switch
from llmconv.runtime.eager.limit_margins import LimitMargins
from llmconv.runtime.eager.torch_runner import TorchRunner


class GivenModel(TorchRunner):
    """A model in memory, on its own device and in its own dtype.

    Args:
        model: of transformers, or PEFT's around one; it is set to evaluation, as transformers' pipeline does.
        threads: number of torch threads in this process; 0 for no change.

    Raises:
        UsageProblem: not a causal language model of transformers, or one without its weights.
    """

    def __init__(self, model: Any, *, threads: int = 0) -> None:  # the model is not loaded, so not super's
        model = require_causal_model(model)
        if threads:
            torch.set_num_threads(require_threads(threads))
        self._model: Any = model.eval()
        self._device, self._folder, self._fields = model.device, Path(), {}
        self._code, self.dtype, self.limit_margins = None, "auto", LimitMargins()
        self._set_interface(model)
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._fixed = {"logits_to_keep": 1}
        self.length_switch = length_switch(self.config.to_dict())

    def release(self) -> None:
        """Nothing: the model belongs to the caller."""

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was made for; None if unknown."""
        return length_of(self.config.to_dict())


def require_causal_model(model: Any) -> PreTrainedModel:
    """A causal language model of transformers; of PEFT's model around one, the model with the adapter in its layers.

    Args:
        model: a torch module.

    Raises:
        UsageProblem: it is something else, has a tuned prefix, or lacks its weights.
    """
    if type(model).__module__.partition(".")[0] == "peft" and hasattr(model, "get_base_model"):
        if getattr(model.active_peft_config, "is_prompt_learning", False):
            raise UsageProblem(
                "the model has a tuned prefix, which belongs to no layer",
                hint="save the adapter; then `llmconv export MODEL --prefix ADAPTER`",
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel) or not model.can_generate() or model.config.is_encoder_decoder:
        raise UsageProblem(
            f"`model` is {kind_of(model)}, not a causal language model of transformers",
            hint="give `AutoModelForCausalLM.from_pretrained(…)`, or a model folder",
        )
    if odd := next((name for name, tensor in model.named_parameters() if tensor.is_meta), None):
        raise UsageProblem(
            f"the weights of the model are not in memory: `{odd}` is on the meta device",
            hint="load it without offloading: `from_pretrained(…)` without `device_map`",
        )
    return model
