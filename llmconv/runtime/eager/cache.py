"""EagerCache: transformers' own cache of the eager model, read by the names of the graphs' outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from llmconv.runtime.cache_names import CONVOLUTION, RECURRENT, layer_of
from llmconv.tensors import Array

STATE_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""transformers' names of layer types that keep a state of fixed size."""


@dataclass(frozen=True)
class EagerCache:
    """A DynamicCache without sliding layers: every layer with attention keeps every token.

    Attributes:
        cache: transformers' object.
        input_ids, position_ids: of all tokens in it, [batch, length].
    """

    cache: Any
    input_ids: Array
    position_ids: Array

    @property
    def length(self) -> int:
        """Tokens in the cache, padding included."""
        return int(self.input_ids.shape[1])

    @property
    def has_recurrent_state(self) -> bool:
        """Whether some layer keeps a recurrent state."""
        return any(name.startswith("present_recurrent") for name in self._tensors())

    def arrays(self) -> dict[str, Array]:
        """By name, see `Cache.arrays`; bfloat16 widened to float32."""
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
    """An empty DynamicCache that keeps every token; of a mixed model, with the right kind of layer in each place."""
    if not keeps_states(config):
        return DynamicCache()
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    cache.layers = [DynamicLayer() if isinstance(layer, DynamicSlidingWindowLayer) else layer for layer in cache.layers]
    return cache


def keeps_states(config: Any) -> bool:
    """Whether some layers keep a state of fixed size, instead of every token's keys and values."""
    return bool(STATE_TYPES & set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ()))


def restore(cache: Any, name: str, tensor: torch.Tensor) -> None:
    """Puts a tensor of another runner's cache where `EagerCache.arrays` would find it under `name`."""
    prefix, _, rest = name.partition(".")
    index, part = layer_of(name) or 0, rest.partition(".")[2]
    if prefix == "present":
        _restore_keys(cache, index, part, tensor)
        return
    layer, number = cache.layers[index], int(part or 0)
    kind = prefix.removeprefix("present_")
    layer.lazy_initialization(**{f"{kind}_states": tensor}, state_idx=number)
    getattr(layer, f"{kind}_states")[number].copy_(tensor)
    layer.has_previous_state[number] = True


def _restore_keys(cache: Any, index: int, part: str, tensor: torch.Tensor) -> None:
    if part == "key":
        cache.update(tensor, tensor[..., :0], index)
    else:
        cache.layers[index].values = tensor


def to_numpy(tensor: torch.Tensor) -> Array:
    """A numpy view of a tensor; bfloat16, which numpy lacks, is widened to float32."""
    array: Array = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).detach().numpy()
    return array
