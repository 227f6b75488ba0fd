"""EagerCache: transformers' cache of the eager model, with the names of the graphs' outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from llmconv.runtime.extra_inputs import (
    CONVOLUTION,
    PAST,
    RECURRENT,
    SEQUENCE,
    ExtraInput,
    ModelCall,
    is_state,
    layer_of,
)
from llmconv.tensors import Array

# transformers' `layer_types` with a state of fixed size
STATE_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}


@dataclass(frozen=True)
class EagerCache:
    """A DynamicCache without sliding layers: every attention layer keeps every token."""

    cache: Any
    input_ids: Array  # of the tokens in the cache, int64 [batch, length], like the next
    position_ids: Array
    # values of extra inputs, those of all tokens in the cache for inputs with one for each new token
    extras: Mapping[str, Array] = field(default_factory=dict)

    def continued(
        self, call: ModelCall, extras: Mapping[str, Array], inputs: Mapping[str, ExtraInput]
    ) -> tuple[ModelCall, dict[str, Array]]:
        """One call of the tokens in the cache and those of `call`, and the values of its (resolved) extra inputs."""
        ids, positions = (
            np.concatenate(pair, axis=1)
            for pair in ((self.input_ids, call.input_ids), (self.position_ids, call.position_ids))
        )
        whole = ModelCall(ids, call.attention_mask, positions)
        return whole, {name: self._joined(inputs[name], array, whole) for name, array in extras.items()}

    def _joined(self, extra: ExtraInput, new: Array, whole: ModelCall) -> Array:
        if SEQUENCE not in extra.axes:
            return extra.value(whole) if PAST in extra.axes else new
        before = self.extras.get(extra.name)
        return new if before is None else np.concatenate([before, new], axis=extra.axes.index(SEQUENCE))

    @property
    def length(self) -> int:
        """Number of tokens in the cache, padding included."""
        return int(self.input_ids.shape[1])

    @property
    def has_recurrent_state(self) -> bool:
        return any(name.startswith("present_recurrent") for name in self._tensors())

    @property
    def has_states(self) -> bool:
        return any(map(is_state, self._tensors()))

    def arrays(self) -> dict[str, Array]:
        """See `Cache.arrays`; bfloat16 is converted to float32."""
        return {name: to_numpy(tensor) for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(self.cache.layers):
            if getattr(layer, "keys", None) is not None:
                tensors |= {f"present.{index}.key": layer.keys, f"present.{index}.value": layer.values}
            for part in (CONVOLUTION, RECURRENT):
                states = [state for state in getattr(layer, f"{part}_states", {}).values() if state is not None]
                for number, state in enumerate(states):
                    tensors[f"present_{part}.{index}" + (f".{number}" if len(states) > 1 else "")] = state
        return tensors


def fresh_cache(config: Any) -> Any:
    """An empty DynamicCache that keeps every token; layers with a state have their own layer class."""
    if not keeps_states(config):
        return DynamicCache()
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    cache.layers = [DynamicLayer() if isinstance(layer, DynamicSlidingWindowLayer) else layer for layer in cache.layers]
    return cache


def keeps_states(config: Any) -> bool:
    """Whether any layer keeps a state of fixed size instead of the keys and values of every token."""
    return bool(STATE_TYPES & set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ()))


def restore(cache: Any, name: str, tensor: torch.Tensor) -> None:
    """Stores `name`, as `present.0.key`, [batch, kv_heads, length, head_dim] or a state; keys before values."""
    prefix, _, rest = name.partition(".")
    index, part = layer_of(name) or 0, rest.partition(".")[2]
    if prefix == "present":
        if part == "key":
            cache.update(tensor, tensor[..., :0], index)
        else:
            cache.layers[index].values = tensor
        return
    layer, number = cache.layers[index], int(part or 0)
    kind = prefix.removeprefix("present_")
    layer.lazy_initialization(**{f"{kind}_states": tensor}, state_idx=number)
    getattr(layer, f"{kind}_states")[number].copy_(tensor)
    layer.has_previous_state[number] = True


def to_numpy(tensor: torch.Tensor) -> Array:
    """A numpy view of a tensor, or its copy from a device; bfloat16, which numpy lacks, is converted to float32."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).detach().cpu().numpy()
