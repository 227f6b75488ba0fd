"""`layer_replication` of PEFT: the base with its layers repeated in the order of the adapted model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.adapter import Adapter
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor

LAYER = re.compile(r"((?:[A-Za-z_]\w*\.)*(?:layers|h|layer)\.)(\d+)(\..+)")
COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")
"""Fields with one entry for each layer."""

MOST = 4096
"""Maximum number of layers: a short config could ask for more than fit into memory."""

NUMBERED = ("mlp_only_layers", "moe_layers", "attn_layer_indices")
"""Fields with layer numbers, which are ambiguous for a model with other layers."""


def replicated(base: Checkpoint, adapters: Sequence[Adapter]) -> Checkpoint:
    """The base with the layers that the adapters were trained on (PEFT `tuners_utils.py`, `replicate_layers`).

    Raises:
        UnsupportedInput: adapters with different layers, or a model without numbered layers.
        MalformedInput: a layer that the base does not have.
    """
    wanted = {adapter.config.layers for adapter in adapters}
    if wanted <= {()}:
        return base
    if len(wanted) > 1:
        raise UnsupportedInput(
            "the adapters have different `layer_replication`", hint="they are of different models; merge one at a time"
        )
    tensors, order, count = _restacked(base.tensors, wanted.pop())
    return replace(base, tensors=tensors, config=_config(base.config, count, order))


def _restacked(
    tensors: Mapping[str, LazyTensor], ranges: Sequence[tuple[int, int]]
) -> tuple[dict[str, LazyTensor], list[int], int]:
    """The tensors under their new layer numbers, the old number of each layer, and the old number of layers."""
    layers = {name: match for name in tensors if (match := LAYER.fullmatch(name))}
    stacks = Counter(match[1] for match in layers.values())
    if not stacks:
        raise UnsupportedInput("the base has no numbered layers to replicate", hint="give a decoder of the llama kind")
    prefix = stacks.most_common(1)[0][0]
    layers = {name: match for name, match in layers.items() if match[1] == prefix}
    count = 1 + max(int(match[2]) for match in layers.values())
    order = _order(ranges, count)
    homes: dict[int, list[int]] = {}
    for new, old in enumerate(order):
        homes.setdefault(old, []).append(new)
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if match := layers.get(name):
            result |= {f"{prefix}{new}{match[3]}": tensor for new in homes.get(int(match[2]), [])}
        else:
            result[name] = tensor
    return result, order, count


def _order(ranges: Sequence[tuple[int, int]], count: int) -> list[int]:
    """The base's layer for each layer of the model; their number is checked first."""
    if (last := max(stop for _, stop in ranges)) > count:
        raise MalformedInput(
            f"`layer_replication` names layer {last - 1}, the base has {count}",
            hint="the adapter was trained on another model; see its `base_model_name_or_path`",
        )
    if (total := sum(stop - start for start, stop in ranges)) > MOST:
        raise UnsupportedInput(
            f"`layer_replication` makes {total} layers of {count}, more than {MOST}",
            hint="repair `adapter_config.json`, or copy the adapter again",
        )
    return [layer for start, stop in ranges for layer in range(start, stop)]


def _config(config: Mapping[str, Any], count: int, order: Sequence[int]) -> dict[str, Any]:
    result = deepcopy(dict(config))
    for part in (result, result.get("text_config")):
        if not isinstance(part, dict):
            continue
        if set_ := [name for name in NUMBERED if part.get(name)]:
            raise UnsupportedInput(
                f"the base's config numbers its layers in `{set_[0]}`, which replication would change",
                hint="repeat the layers of the base yourself, and remove `layer_replication` from the adapter",
            )
        part |= {name: len(order) for name in COUNTS if name in part}
        part |= {
            name: [part[name][layer] for layer in order]
            for name in LAYER_LISTS
            if isinstance(part.get(name), list) and len(part[name]) == count
        }
    return result
