"""A few layers of the eager model on fake weights -> an ONNX graph whose weights are still graph inputs.

Attention becomes one ONNX `Attention` node (opset 23) through transformers' `AttentionInterface`; families that do not
use that interface trace with their own attention code. The cache concatenates, so a past may be empty.
"""

from __future__ import annotations

import ast
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging as transformers_logging

from llmconv.export.buffers import buffer_cache
from llmconv.export.fake_model import build
from llmconv.export.form import GROWING, Form
from llmconv.export.input_maps import BATCH, PAST, SEQUENCE, TOTAL, InputMap, Port
from llmconv.runtime.buffers import SLOTS, WRITE_INDICES
from llmconv.runtime.embeddings import INPUTS_EMBEDS

ATTENTION = "llmconv"
EXAMPLE = {BATCH: 2, SEQUENCE: 3, PAST: 5, TOTAL: 8, SLOTS: 13}
"""Sizes traced with; none is 0 or 1, because torch.export would specialise the axis."""

SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass
class TracedGraph:
    """A traced model.

    Attributes:
        model: the ONNX model; inputs are the input map's ports, then the weights by parameter name.
        weights: the weight inputs, by parameter name.
        layers_name: name of the list of layers, such as `model.layers`.
        num_layers: how many layers were traced.
        tied: parameter name -> name of the parameter it shares its memory with.
        base_prefix: name of the inner model (`transformer`), which some checkpoints leave out of their tensor names.
        form: how the cache is kept, and which axes are numbers.
    """

    model: ir.Model
    weights: dict[str, ir.Value]
    layers_name: str
    num_layers: int
    tied: dict[str, str]
    base_prefix: str
    form: Form


class PastLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's cache over given past tensors; `update` concatenates."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends along the sequence axis; inputs and results are `[batch, kv_heads, length, head_dim]`."""
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Length of the cache."""
        return self.keys.shape[-2]


class CacheAsTensors(nn.Module):
    """The model with its cache spelled out as flat tensors, key before value, layers in order."""

    def __init__(self, model: PreTrainedModel, form: Form) -> None:
        super().__init__()
        self.model, self._form = model, form

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None,
        write_indices: Tensor | None,
        past: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits `[batch, sequence, vocab]` and the cache with the new tokens in it; tokens may be embeddings."""
        if self._form.cache == GROWING.cache:
            cache = Cache(layers=[PastLayer(*pair) for pair in zip(past[::2], past[1::2], strict=True)])
        else:
            cache = buffer_cache(past, input_ids, attention_mask, write_indices)
        positions = {} if position_ids is None else {"position_ids": position_ids}
        tokens = {INPUTS_EMBEDS if self._form.embeddings else "input_ids": input_ids}
        result = self.model(**tokens, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **positions)
        return result.logits, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


class Embedded(nn.Module):
    """The embedding table alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """What the model makes of tokens before its first layer."""
        embedded: Tensor = self.model.get_input_embeddings()(input_ids)
        return embedded


def onnx_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """One ONNX `Attention` node; grouped-query attention needs no repeated keys there.

    Args:
        module: the calling attention layer.
        query: `[batch, heads, sequence, head_dim]`.
        key: `[batch, kv_heads, total, head_dim]`, past included; `value` likewise.
        attention_mask: additive, `[batch, 1, sequence, total]`.
    """
    attributes: dict[str, Any] = {"scale": float(query.shape[-1] ** -0.5 if scaling is None else scaling)}
    if softcap:
        attributes["softcap"] = float(softcap)
    (output,) = torch.onnx.ops.symbolic_multi_out(
        "::Attention",
        [query, key, value, attention_mask],
        attributes,
        dtypes=[query.dtype],
        shapes=[(*query.shape[:-1], value.shape[-1])],
        version=GROWING.opset,
    )
    return output.transpose(1, 2), None


def additive_mask(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **unused: Any,
) -> Tensor:
    """The mask of eager attention: 0 where a key is seen, the dtype's minimum elsewhere.

    A row that sees nothing (left padding) then attends evenly, as eager attention does, and never becomes NaN.

    Returns:
        `[batch or 1, 1, q_length, kv_length]`.
    """
    offset = q_offset.reshape(-1, 1, 1, 1) if isinstance(q_offset, Tensor) else q_offset
    queries = torch.arange(q_length)[None, None, :, None] + offset
    keys = (torch.arange(kv_length) + kv_offset)[None, None, None, :]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    seen = mask_function(zero, zero, queries, keys)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, :]
    return torch.where(seen, 0.0, torch.finfo(dtype).min)


AttentionInterface.register(ATTENTION, onnx_attention)
AttentionMaskInterface.register(ATTENTION, additive_mask)


def trace(config: Any, input_map: InputMap, form: Form = GROWING) -> TracedGraph:
    """Traces all layers of `config` (shorten it first), for any sizes that `form` leaves open."""
    with _quiet_libraries(), torch.no_grad():
        model = build(config)
        inputs, outputs = form.inputs(input_map.inputs(config)), form.outputs(input_map.outputs(config))
        model.config._attn_implementation = ATTENTION
        program = torch.export.export(
            CacheAsTensors(model, form), _example(inputs), dynamic_shapes=_dynamic(inputs), strict=False
        )
        onnx_program = torch.onnx.export(program, optimize=False, opset_version=form.opset, verbose=False)
    assert onnx_program is not None
    return _traced(onnx_program.model, model, config, form, inputs, outputs)


def trace_embeddings(config: Any) -> TracedGraph:
    """The embedding table as a graph: `input_ids` to `inputs_embeds`, float32 `[batch, sequence, hidden]`."""
    tokens = Port("input_ids", "int64", (BATCH, SEQUENCE))
    embedded = Port(INPUTS_EMBEDS, "float32", (BATCH, SEQUENCE, config.hidden_size))
    with _quiet_libraries(), torch.no_grad():
        model = build(config)
        program = torch.export.export(
            Embedded(model),
            (torch.ones(_sizes(tokens), dtype=torch.int64),),
            dynamic_shapes=(_axes(tokens),),
            strict=False,
        )
        onnx_program = torch.onnx.export(program, optimize=False, opset_version=GROWING.opset, verbose=False)
    assert onnx_program is not None
    return _traced(onnx_program.model, model, config, GROWING, [tokens], [embedded])


def _traced(
    graph_model: ir.Model,
    model: PreTrainedModel,
    config: Any,
    form: Form,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
) -> TracedGraph:
    """The exporter's graph with its weights as inputs, and its ports named."""
    weights = _weights_to_inputs(graph_model, model)
    onnxscript.optimizer.optimize(graph_model)
    _name_ports(graph_model, inputs, outputs)
    return TracedGraph(
        graph_model,
        weights,
        _layers_name(model, config.num_hidden_layers),
        config.num_hidden_layers,
        dict(model._tied_weights_keys or {}) if config.tie_word_embeddings else {},
        model.base_model_prefix,
        form,
    )


def scopes(node: ir.Node) -> list[str]:
    """Module names around a node, outermost first, as parameters are named (`model.layers.0.mlp`)."""
    text = node.metadata_props.get(SCOPES)
    names = ast.literal_eval(text)[:-1] if text else []
    return [name.removeprefix("model").removeprefix(".") for name in names]


def _example(inputs: Sequence[Port]) -> tuple[Any, ...]:
    """Arguments of the traced module: one per input, the cache as one list."""
    tokens = [torch.ones(_sizes(port), dtype=getattr(torch, port.dtype)) for port in inputs if not _is_cache(port)]
    # One number seen as a whole buffer: a static cache may be larger than memory.
    cache = [torch.zeros(1).expand(_sizes(port)) for port in inputs if _is_cache(port)]
    return (*_with_optional(inputs, tokens), cache)


def _dynamic(inputs: Sequence[Port]) -> tuple[Any, ...]:
    symbols = [_axes(port) for port in inputs]
    first = next(at for at, port in enumerate(inputs) if _is_cache(port))
    return (*_with_optional(inputs, symbols[:first]), symbols[first:])


def _with_optional(inputs: Sequence[Port], given: Sequence[Any]) -> list[Any]:
    """What belongs to each token input in the order of the module's arguments; None for inputs that there are not."""
    by_name = {port.name: value for port, value in zip(inputs, given, strict=False)}
    names = ["attention_mask", "position_ids", WRITE_INDICES]
    return [given[0], *(by_name.get(name) for name in names)]


def _axes(port: Port) -> dict[int, Any]:
    return {at: Dim.AUTO for at, axis in enumerate(port.axes) if isinstance(axis, str)}


def _sizes(port: Port) -> list[int]:
    return [axis if isinstance(axis, int) else EXAMPLE[axis] for axis in port.axes]


def _is_cache(port: Port) -> bool:
    return port.name.startswith("past_key_values")


def _weights_to_inputs(model: ir.Model, module: PreTrainedModel) -> dict[str, ir.Value]:
    """Fake initializers become graph inputs: the optimizer must not look into them."""
    weights = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        value = model.graph.initializers.get(f"model.{name}")
        if value is None:
            continue
        model.graph.initializers.pop(f"model.{name}")
        if not value.uses():
            continue  # the table of a decoder that takes embeddings
        value.const_value = None
        value.name = name
        model.graph.inputs.append(value)
        weights[name] = value
    return weights


def _name_ports(model: ir.Model, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    for value, port in zip(model.graph.inputs, inputs, strict=False):
        value.name = port.name
        value.shape = ir.Shape(port.axes)
    for value, port in zip(model.graph.outputs, outputs, strict=True):
        value.name = port.name
        value.shape = ir.Shape(port.axes)


def _layers_name(module: PreTrainedModel, num_layers: int) -> str:
    named: Iterable[tuple[str, nn.Module]] = module.named_modules()
    return min((name for name, part in named if isinstance(part, nn.ModuleList) and len(part) == num_layers), key=len)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """The exporters talk about torchvision and about themselves; none of it concerns the user."""
    exporter = logging.getLogger("torch.onnx")
    levels = exporter.level, transformers_logging.get_verbosity()
    exporter.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(levels[0])
        transformers_logging.set_verbosity(levels[1])
