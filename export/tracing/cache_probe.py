"""The shapes of a model's cache, determined by running the model on fake weights.

A config does not declare them reliably: families have many names for key/value heads, multi-head latent attention has
values of another size than keys, and layers may share a cache or have different heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from llmconv.errors import UnsupportedInput
from llmconv.export.caches.kind import STATE_TYPES
from llmconv.export.caches.traced_layers import PastLayer
from llmconv.export.input_map import InputMap, Port, decoder_config
from llmconv.export.tracing.extra_tensors import example_values, fitting
from llmconv.runtime.extra_inputs import BATCH, PAST, SEQUENCE, TOTAL, ExtraInput

HeadShape = tuple[int, int]
"""(heads, size of one head)."""


def ports_of(
    model: PreTrainedModel, input_map: InputMap, extras: Mapping[str, ExtraInput] | None = None
) -> tuple[list[Port], list[Port]]:
    """Inputs and outputs of a graph, with the heads and head sizes of the model itself, which is on fake weights."""
    inputs, outputs = list(input_map.inputs(model.config)), list(input_map.outputs(model.config))
    if input_map.kind.mixed:
        return inputs, outputs
    _require_no_states(model)
    shapes = probe(model, extras)
    return with_shapes(inputs, shapes), with_shapes(outputs, shapes)


def probe(model: PreTrainedModel, extras: Mapping[str, ExtraInput] | None = None) -> list[tuple[HeadShape, HeadShape]]:
    """Key and value shapes of every layer that keeps them, from one run with an empty cache on fake weights."""
    mode = next(model.parameters()).fake_mode
    cache = Cache(layer_class_to_replicate=PastLayer)
    tokens = torch.ones(2, 3, dtype=torch.int64)
    with fitting(extras or {}), mode, torch.no_grad():
        given = example_values(extras or {}, model.dtype, {BATCH: 2, SEQUENCE: 3, PAST: 0, TOTAL: 3})
        model(input_ids=tokens, attention_mask=tokens, past_key_values=cache, use_cache=True, **given)
    return [(_head_shape(layer.keys), _head_shape(layer.values)) for layer in cache.layers]


def _require_no_states(model: PreTrainedModel) -> None:
    """Refuses a family whose layers keep states although its input map declares none."""
    kinds = STATE_TYPES & set(getattr(decoder_config(model.config), "layer_types", None) or ())
    if kinds:
        raise UnsupportedInput(
            f"unsupported cache: layers of type `{min(kinds)}` keep a state that the input map does not declare",
            hint="add the kind to its row in `export/families.py`; see docs/adding-a-family.md",
        )


def _head_shape(tensor: Tensor) -> HeadShape:
    return tensor.shape[1], tensor.shape[3]


def with_shapes(ports: Sequence[Port], shapes: Sequence[tuple[HeadShape, HeadShape]]) -> list[Port]:
    """The ports of a graph with these shapes of key and value, by layer."""
    prefix, length = ("past_key_values", PAST) if ports[0].name == "input_ids" else ("present", TOTAL)
    like = next((port for port in ports if port.name.startswith(f"{prefix}.")), ports[0])
    return [port for port in ports if not port.name.startswith(f"{prefix}.")] + [
        replace(like, name=f"{prefix}.{layer}.{part}", axes=(like.axes[0], heads, length, size))
        for layer, pair in enumerate(shapes)
        for part, (heads, size) in zip(("key", "value"), pair, strict=True)
    ]
