"""The extra tensors of a traced call, and the shapes of a model's cache, found by running the model on fake weights.

A config does not declare the shapes reliably: families have many names for key/value heads, multi-head latent attention
has values of another size than keys, and layers may share a cache or have different heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from llmconv.errors import LlmconvError, UnsupportedInput, first_line
from llmconv.export.caches.kind import STATE_TYPES
from llmconv.export.caches.traced_layers import PastLayer
from llmconv.export.input_map import InputMap, Port, decoder_config
from llmconv.runtime.extra_inputs import BATCH, DOCUMENT, PAST, SEQUENCE, TOTAL, ExtraInput, is_past, require_parameters

HeadShape = tuple[int, int]  # (heads, size of one head)


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


class ExtraTensors:
    """The extra inputs of a traced model by name, resolved; those in `fixed` always have their default."""

    def __init__(self, inputs: Mapping[str, ExtraInput], fixed: Sequence[str]) -> None:
        self._inputs, self._fixed = inputs, fixed

    def named(self, given: Sequence[Tensor], tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The values of all extra inputs by name; `given` are those that are not fixed, in their order.

        `tokens` are `[batch, sequence, …]`, `mask` is `[batch, total]`.
        """
        sizes = {BATCH: mask.shape[0], SEQUENCE: tokens.shape[1], TOTAL: mask.shape[1]}
        sizes[PAST] = sizes[TOTAL] - sizes[SEQUENCE]
        values = dict(zip((name for name in self._inputs if name not in self._fixed), given, strict=True))
        for name, value in values.items():
            _same_sizes(self._inputs[name], value, sizes)
        return {name: values[name] if name in values else _full(extra, sizes) for name, extra in self._inputs.items()}


def _same_sizes(extra: ExtraInput, value: Tensor, sizes: Mapping[str, int]) -> None:
    """Declares that the symbolic axes have the sizes of tokens and mask, so that the trace has one symbol for each."""
    for at, axis in enumerate(extra.declared):
        if isinstance(axis, str):
            torch._check(value.shape[at] == sizes[axis])  # type: ignore[no-untyped-call]


def _full(extra: ExtraInput, sizes: Mapping[str, int]) -> Tensor:
    shape = [sizes[axis] if isinstance(axis, str) else axis for axis in extra.declared]
    return torch.full(shape, extra.default, dtype=getattr(torch, extra.dtype))  # type: ignore[arg-type]


def example_values(extras: Mapping[str, ExtraInput], dtype: torch.dtype, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Zeros for every extra input, by name; `sizes` are those of the symbolic axes."""
    found = {}
    for name, extra in extras.items():
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in extra.declared]
        found[name] = torch.zeros(shape, dtype=dtype if extra.dtype == "float32" else getattr(torch, extra.dtype))
    return found


def extras_of(model: PreTrainedModel, input_map: InputMap) -> dict[str, ExtraInput]:
    """The extra inputs of a model by name, resolved; its `forward` has their parameters.

    Raises UnsupportedInput: `forward` lacks a parameter, or needs another.
    """
    extras = input_map.extra_inputs(model.config)
    require_parameters(model.forward, extras)
    return extras


def require_declared(ports: Sequence[Port], extras: Mapping[str, ExtraInput]) -> None:
    """Raises UnsupportedInput for a port that an input map adds to `inputs` alone: nothing would feed it."""
    names = {"input_ids", "attention_mask", "position_ids", *extras}
    unknown = [port.name for port in ports if port.name not in names and not is_past(port.name)]
    if unknown:
        raise UnsupportedInput(
            f"the input map has an unsupported input `{unknown[0]}`", hint="declare it as an `ExtraInput` in `extras`"
        )


def require_fit(module: nn.Module, arguments: Sequence[Any], extras: Mapping[str, ExtraInput]) -> None:
    """Raises UnsupportedInput if a model with extra inputs fails on fake numbers.

    Sizes of different axes differ, so that a wrong axis shows.
    """
    if not extras:
        return
    mode = next(module.parameters()).fake_mode  # type: ignore[attr-defined]
    with fitting(extras), mode, torch.no_grad():
        module(*pytree.tree_map_only(Tensor, mode.from_tensor, tuple(arguments)))


@contextmanager
def fitting(extras: Mapping[str, ExtraInput]) -> Iterator[None]:
    """Context that raises UnsupportedInput if a model with extra inputs fails in it."""
    try:
        yield
    except Exception as error:  # the model's own code may raise anything
        if not extras or isinstance(error, LlmconvError):
            raise
        inputs = [f"`{name}` {extra.dtype} [{', '.join(map(str, extra.declared))}]" for name, extra in extras.items()]
        raise UnsupportedInput(
            f"the model fails with the extra inputs {', '.join(inputs)}: {type(error).__name__}: "
            f"{first_line(error, 200)}",
            hint=f"do name, dtype and axes fit its `forward`? {DOCUMENT}",
        ) from error
