"""What a model keeps of each token: the shapes of its cache, found by running it on fake weights.

A config does not say it reliably: families count key/value heads under many names, multi-head latent attention has
values of another size than keys, and layers may share a cache or differ in their heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from llmconv.export.input_maps import PAST, TOTAL, Port

HeadShape = tuple[int, int]
"""(heads, size of one head)."""


class PastLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's cache; `update` concatenates, also where the family's own layer would keep a window only."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, keys is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends along the sequence axis; inputs and results are `[batch, kv_heads, length, head_dim]`."""
        past = self.keys is not None
        self.keys = torch.cat([self.keys, key_states], dim=-2) if past else key_states
        self.values = torch.cat([self.values, value_states], dim=-2) if past else value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Length of the cache."""
        return 0 if self.keys is None else self.keys.shape[-2]


def cache_of(past: Sequence[Tensor]) -> Cache:
    """A cache over flat tensors, key before value, layers in order."""
    return Cache(layers=[PastLayer(*pair) for pair in zip(past[::2], past[1::2], strict=True)])


def probe(model: PreTrainedModel) -> list[tuple[HeadShape, HeadShape]]:
    """Key and value of every layer that keeps any, from one run over an empty cache."""
    mode = next(model.parameters()).fake_mode
    cache = Cache(layer_class_to_replicate=PastLayer)
    tokens = torch.ones(2, 3, dtype=torch.int64)
    with mode, torch.no_grad():
        model(input_ids=tokens, attention_mask=tokens, past_key_values=cache, use_cache=True)
    return [(_head_shape(layer.keys), _head_shape(layer.values)) for layer in cache.layers]


def _head_shape(tensor: Tensor) -> HeadShape:
    return tensor.shape[1], tensor.shape[3]


def with_shapes(ports: Sequence[Port], shapes: Sequence[tuple[HeadShape, HeadShape]]) -> list[Port]:
    """The same ports with the cache that was found in the place of the one that the config implies."""
    prefix, length = ("past_key_values", PAST) if ports[0].name == "input_ids" else ("present", TOTAL)
    like = next((port for port in ports if port.name.startswith(f"{prefix}.")), ports[0])
    return [port for port in ports if not port.name.startswith(f"{prefix}.")] + [
        replace(like, name=f"{prefix}.{layer}.{part}", axes=(like.axes[0], heads, length, size))
        for layer, pair in enumerate(shapes)
        for part, (heads, size) in zip(("key", "value"), pair, strict=True)
    ]
