"""TorchRunner: the Hugging Face model with the attention and the growing cache that transformers' `generate` uses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from llmconv.argument_checks import require_threads
from llmconv.causal_lm import length_of, length_switch
from llmconv.errors import UsageProblem
from llmconv.files.paths import kind_of
from llmconv.runtime.eager.cache import EagerCache, to_numpy
from llmconv.runtime.eager.limit_margins import LimitMargins
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.extra_inputs import AXES, DEEPSTACK_FEATURES, ExtraInput, ExtraValues, ModelCall, is_state
from llmconv.runtime.images.families import image_family
from llmconv.runtime.images.family import Features, Given
from llmconv.runtime.library_patches import reset_dynamic_rope
from llmconv.runtime.runner import ArrayCache, Cache, Extras, PlacedEmbeddings, Step, default_positions, is_lost
from llmconv.tensors import FLOATS, Array, LazyTensor


@dataclass(frozen=True)
class TorchCache:
    """The first `length` tokens, padding included, of a DynamicCache, which the step that continues them extends.

    `reached` is one list for all steps of that cache, with the number of tokens that it has now. Keys and values of
    earlier steps stay in it, and are continued in a copy; states are those of the latest step alone.
    """

    cache: Any
    length: int
    reached: list[int]

    @property
    def is_latest(self) -> bool:
        """Whether no later step has extended the cache."""
        return self.reached == [self.length]

    @property
    def is_lost(self) -> bool:
        """Whether the states after these tokens no longer exist, see `runner.is_lost`."""
        return not self.is_latest and self._named.has_states

    def kept(self) -> Cache:
        """These tokens for after a step that extends the cache: a copy if there are states."""
        if not self._named.has_states:
            return self
        return ArrayCache({name: array.copy() for name, array in self.arrays().items()}, self.length)

    def arrays(self) -> Mapping[str, Array]:
        whole = self._named.arrays()
        return {name: one if is_state(name) else one[:, :, : self.length] for name, one in whole.items()}

    @property
    def has_recurrent_state(self) -> bool:
        return self._named.has_recurrent_state

    @property
    def _named(self) -> EagerCache:
        ids = np.zeros((1, self.length), dtype=np.int64)  # only the length is used
        return EagerCache(self.cache, ids, ids)


class TorchRunner(EagerRunner):
    """The model with the default attention of transformers, in `dtype`, `auto` for that of the weights.

    PEFT applies `adapter` without merging; `tensors` replace the folder's by name; `threads` of torch, 0 for no change.
    Raises InputRefused if transformers cannot load the folder, or PEFT the adapter.
    """

    attention = None

    def __init__(
        self,
        folder: Path,
        dtype: str = "auto",
        *,
        code: Path | None = None,
        adapter: Path | None = None,
        tensors: Mapping[str, LazyTensor] | None = None,
        threads: int = 0,
        device: str = "cpu",
        extra_inputs: Sequence[ExtraInput] = (),
    ) -> None:
        options: dict[str, Any] = {"code": code, "device": device, "adapter": adapter, "extra_inputs": extra_inputs}
        super().__init__(folder, dtype, weights=tensors, **options)
        if threads:
            torch.set_num_threads(require_threads(threads))

    def _set_interface(self, model: Any, extra_inputs: Sequence[ExtraInput] = ()) -> None:
        super()._set_interface(model, extra_inputs)
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._fixed = {"logits_to_keep": 1}

    def _load(self, folder: Path, fields: dict[str, Any], dtype: torch.dtype | str) -> Any:
        if dtype == "auto" and self._given is not None:  # as transformers finds it, of all its tensors the first float
            floats = (tensor.dtype.name for tensor in self._given.values() if tensor.dtype.name in FLOATS)
            named = fields.get("dtype") or fields.get("torch_dtype")
            dtype = getattr(torch, named if named in FLOATS else next(floats, "float32"))
        return super()._load(folder, fields, dtype)

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        if past is None:
            reset_dynamic_rope(self.model)
        if past and is_lost(past):
            problem = "a later call has continued the states of this cache"
            raise UsageProblem(problem, hint="continue the cache of the latest call, or run the tokens again")
        values = ExtraValues(self.extra_inputs, extras or {})
        new, done = call.input_ids.shape[1], past.length if past else 0
        if not (isinstance(past, TorchCache) and past.is_latest):
            past = TorchCache(self.cache_of(past), done, [done])
        width = new
        if done and new > 1 and not self._continues:  # a recurrent state is continued by one token at a time only
            width = 1 if past.has_recurrent_state else new
        past.reached[0] = done + new  # also if it fails on the way
        for start in range(0, new, width):
            at = slice(start, start + width)
            seen = call.attention_mask[:, : done + min(at.stop, new)]
            piece = ModelCall(call.input_ids[:, at], seen, call.position_ids[:, at])
            own = placed.columns(start, start + width) if placed else None
            logits = self._forward(piece, past.cache, values.of(piece, call, start), own)
        return Step(to_numpy(logits[:, -1:]), TorchCache(past.cache, done + new, past.reached))


class GivenModel(TorchRunner):
    """A model of transformers, or PEFT's around one, in memory, on its own device and in its own dtype.

    It is set to evaluation, as transformers' pipeline does. `threads` is the number of torch threads in this process; 0
    for no change. Raises as `require_causal_model`.
    """

    def __init__(self, model: Any, *, threads: int = 0) -> None:  # the model is not loaded, so not super's
        model = require_causal_model(model)
        if threads:
            torch.set_num_threads(require_threads(threads))
        self._model: Any = model.eval()
        self._device, self._folder, self._fields = model.device, Path(), {}
        self._code, self.dtype, self.limit_margins = None, "auto", LimitMargins()
        self._set_interface(model)
        self.length_switch = length_switch(self.config.to_dict())

    def release(self) -> None:
        """Nothing: the model belongs to the caller."""

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was made for; None if unknown."""
        return length_of(self.config.to_dict())


def require_causal_model(model: Any) -> PreTrainedModel:
    """A causal language model of transformers, of PEFT's with the adapter in its layers; else UsageProblem."""
    if type(model).__module__.partition(".")[0] == "peft" and hasattr(model, "get_base_model"):
        if getattr(model.active_peft_config, "is_prompt_learning", False):
            problem = "the model has a tuned prefix, which belongs to no layer"
            raise UsageProblem(problem, hint="save the adapter; then `llmconv export MODEL --prefix ADAPTER`")
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel) or not model.can_generate() or model.config.is_encoder_decoder:
        problem = f"`model` is {kind_of(model)}, not a causal language model of transformers"
        raise UsageProblem(problem, hint="give `AutoModelForCausalLM.from_pretrained(…)`, or a model folder")
    if odd := next((name for name, tensor in model.named_parameters() if tensor.is_meta), None):
        problem = f"the weights of the model are not in memory: `{odd}` is on the meta device"
        raise UsageProblem(problem, hint="load it without offloading: `from_pretrained(…)` without `device_map`")
    return model


def image_features(runner: EagerRunner, given: Given) -> Features:
    """Features of the images of one prompt, as the whole multimodal model computes them before it places them.

    `given` is what the processor returned; what the model does not take is left out.
    """
    owner = runner.model if hasattr(runner.model, "get_image_features") else runner.model.model
    compute = owner.get_image_features
    taken = inspect.signature(compute).parameters
    with runner.compute_mode():
        found = compute(**runner.tensors({name: one for name, one in given.items() if name in taken}), return_dict=True)
        parts = found.pooler_output
        if parts is None:  # Llama 4 projects where it places them
            parts = owner.multi_modal_projector(found.last_hidden_state)
    deep = [_rows(layer) for layer in getattr(found, "deepstack_features", None) or ()]
    outputs = [{DEEPSTACK_FEATURES: np.concatenate(deep, axis=1)}] if deep else []
    return Features(_rows(parts), outputs)


def _rows(parts: Any) -> Array:
    """Features [tokens, hidden] of all images, which are in one tensor or in one for each image."""
    images = [parts] if isinstance(parts, torch.Tensor) else parts
    return np.concatenate([to_numpy(one).reshape(-1, one.shape[-1]) for one in images])


def prefill_images(runner: EagerRunner, input_ids: Array, attention_mask: Array, given: Given) -> Step:
    """Runs prompts with images as transformers does, in one call of the whole multimodal model.

    `input_ids`, int64 [batch, tokens], have a placeholder for each feature; the mask, of that shape, is 0 for padding;
    `given` is what the processor made of all images, in the order of the placeholders.
    """
    family = image_family(runner.model.config)
    assert family
    positions = default_positions(attention_mask, input_ids.shape[1])
    where = input_ids == runner.model.config.image_token_id
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **family.model_inputs(where, given)}
    if runner.takes_positions and family.counts_positions:
        inputs["position_ids"] = positions
    cache = runner.cache_of(None)
    return Step(to_numpy(runner.call(inputs, cache)), EagerCache(cache, input_ids, positions))


def positions_after_images(runner: EagerRunner, position_ids: Array) -> Array | None:
    """Positions, int64 [3, batch, tokens], of tokens after the prompts of the last `prefill_images`.

    They are as transformers counts them; None in a family without positions on several axes. `position_ids`, int64
    [batch, tokens], are those without images.
    """
    deltas = getattr(getattr(runner.model, "model", None), "rope_deltas", None)
    return None if deltas is None else np.repeat((position_ids + deltas.cpu().numpy())[None], AXES, axis=0)
