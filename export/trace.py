"""A few layers of the eager model on fake weights -> an ONNX graph whose weights are still graph inputs.

Attention becomes one ONNX `Attention` node (opset 23) through transformers' `AttentionInterface`; families that do not
use that interface trace with their own attention code. The cache concatenates, so a past may be empty.
"""

from __future__ import annotations

import ast
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim
from transformers import AttentionInterface, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging as transformers_logging

from llmconv.errors import UnsupportedInput
from llmconv.export.caches.functions import define_functions
from llmconv.export.caches.layers import TracedCache
from llmconv.export.complex_pairs import complex_as_pairs
from llmconv.export.fake_model import build, depth
from llmconv.export.input_maps import BATCH, PAST, SEQUENCE, InputMap, Port, decoder_config
from llmconv.export.layer_kinds import layers_name
from llmconv.export.library_fixes import TRANSLATIONS, exact_constants, fix_program, library_fixes
from llmconv.export.probe import ports_of
from llmconv.runtime.cache_names import is_state

ATTENTION = "llmconv"
OPSET = 23
EXAMPLE = {BATCH: 2, SEQUENCE: 3, PAST: 5}
"""Sizes traced with; none is 0 or 1, because torch.export would specialise the axis."""

TOWERS = r"(^|\.)(vision|visual|image|audio|speech|multi_modal|multimodal|mm_|vq)"
"""Names of what sees or hears in a checkpoint that holds more than a text model."""

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
        transforms: how a checkpoint's tensors become parameters, see `llmconv.export.stored`.
        unused: shapes of parameters and buffers that no node reads, by name.
        token_axes: the trace's symbols of batch size and sequence length.
        ignored: patterns of names of stored tensors that the model has no use for.
    """

    model: ir.Model
    weights: dict[str, ir.Value]
    layers_name: str
    num_layers: int
    tied: dict[str, str]
    base_prefix: str
    transforms: list[Any]
    unused: dict[str, tuple[int, ...]]
    token_axes: tuple[str, ...]
    ignored: tuple[str, ...] = ()


class CacheAsTensors(nn.Module):
    """The model with its cache spelled out as flat tensors, in the order of `past`, its names."""

    def __init__(self, model: PreTrainedModel, past: Sequence[str]) -> None:
        super().__init__()
        self.model, self._past = model, past
        self._cache_name = cache_argument(model)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None, past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits `[batch, sequence, vocab]` and the grown cache."""
        _same_length(past, self._past, attention_mask.shape[1] - input_ids.shape[1])
        cache = TracedCache(self._past, past, depth(self.model.config))
        new, total = (torch.ones_like(tokens[0]).sum() for tokens in (input_ids, attention_mask))
        TracedCache.is_step = (new == 1) & (total > 1)
        if self._cache_name == "cache_params":  # these models take the mask of the new tokens alone
            attention_mask = attention_mask[:, -input_ids.shape[1] :]
        positions = {} if position_ids is None else {"position_ids": position_ids}
        result = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **{self._cache_name: cache}, **positions
        )
        return result.logits, cache.tensors()


def _same_length(tensors: Sequence[Tensor], names: Sequence[str], length: Any) -> None:
    """Every key and value has as many tokens, so the trace has one symbol for all: layers then differ in no length."""
    for tensor, name in zip(tensors, names, strict=True):
        if not is_state(name):
            torch._check(tensor.shape[-2] == length)  # type: ignore[no-untyped-call]


def cache_argument(model: PreTrainedModel) -> str:
    """What the model calls its cache: `cache_params` where no layer has keys and values."""
    return "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"


def onnx_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """One ONNX `Attention` node; grouped-query attention needs no repeated keys there.

    Args:
        module: the calling attention layer.
        query: `[batch, heads, sequence, head_dim]`.
        key: `[batch, kv_heads, total, head_dim]`, past included; `value` likewise.
        attention_mask: additive, `[batch, 1, sequence, total]`.
        s_aux: attention sinks, one logit per head `[heads]`: what a query may attend to instead of any key.
    """
    if s_aux is not None:
        key, value, attention_mask = _with_sink(query, key, value, attention_mask, s_aux)
    attributes: dict[str, Any] = {"scale": float(query.shape[-1] ** -0.5 if scaling is None else scaling)}
    if softcap:
        attributes["softcap"] = float(softcap)
    (output,) = torch.onnx.ops.symbolic_multi_out(
        "::Attention",
        [query, key, value, attention_mask],
        attributes,
        dtypes=[query.dtype],
        shapes=[(*query.shape[:-1], value.shape[-1])],
        version=OPSET,
    )
    return output.transpose(1, 2), None


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, s_aux: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One more key of zeros whose mask is the sink's logit: its score is that logit, and its value adds nothing."""
    key = torch.cat([key, torch.zeros_like(key[:, :, :1])], dim=-2)
    value = torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=-2)
    batch, heads, length, _ = query.shape
    sink = s_aux.reshape(1, -1, 1, 1).expand(batch, -1, length, 1)
    return key, value, torch.cat([attention_mask.expand(batch, heads, length, -1), sink], dim=-1)


def additive_mask(
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
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
    queries = (torch.arange(q_length) + q_offset)[None, None, :, None]
    keys = (torch.arange(kv_length) + kv_offset)[None, None, None, :]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    seen = mask_function(zero, zero, queries, keys)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, :]
    return torch.where(seen, 0.0, torch.finfo(dtype).min)


AttentionInterface.register(ATTENTION, onnx_attention)
AttentionMaskInterface.register(ATTENTION, additive_mask)


def trace(config: Any, input_map: InputMap) -> TracedGraph:
    """Traces all layers of `config` (shorten it first) for any batch, sequence and past length."""
    with _quiet_libraries(), torch.no_grad():
        model = build(config)
        with complex_as_pairs():
            inputs, outputs = ports_of(model, input_map)
        past = [port.name for port in inputs if _is_cache(port)]
        model.set_attn_implementation(ATTENTION)
        traceable = input_map.kind.traceable(sys.modules[type(model).__module__])
        with library_fixes(), complex_as_pairs(), traceable:
            program = torch.export.export(
                CacheAsTensors(model, past), _example(inputs), dynamic_shapes=_dynamic(inputs), strict=False
            )
            fix_program(program.graph_module)
            onnx_program = torch.onnx.export(
                program,
                optimize=False,
                opset_version=OPSET,
                verbose=False,
                custom_translation_table=TRANSLATIONS,
            )
    assert onnx_program is not None
    graph_model = onnx_program.model
    weights = _weights_to_inputs(graph_model, model)
    with exact_constants():
        onnxscript.optimizer.optimize(graph_model)
    define_functions(graph_model, input_map.kind.functions)
    token_axes = tuple(str(axis) for axis in graph_model.graph.inputs[0].shape or ())
    _name_ports(graph_model, inputs, outputs)
    return TracedGraph(
        graph_model,
        weights,
        layers_name(model),
        depth(config),
        dict(model.all_tied_weights_keys),
        model.base_model_prefix,
        get_model_conversion_mapping(model),
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in weights},
        token_axes,
        _ignored(model, config),
    )


def _ignored(model: PreTrainedModel, config: Any) -> tuple[str, ...]:
    """What transformers drops when it loads this model: other heads, and towers where the text model is made alone."""
    alone = decoder_config(config) is not config and decoder_config(model.config) is model.config
    return (*(model._keys_to_ignore_on_load_unexpected or ()), *((TOWERS,) if alone else ()))


def scopes(node: ir.Node) -> list[str]:
    """Module names around a node, outermost first, as parameters are named (`model.layers.0.mlp`)."""
    text = node.metadata_props.get(SCOPES)
    names = ast.literal_eval(text)[:-1] if text else []
    return [name.removeprefix("model").removeprefix(".") for name in names]


def _example(inputs: Sequence[Port]) -> tuple[Any, ...]:
    batch, new, past = EXAMPLE[BATCH], EXAMPLE[SEQUENCE], EXAMPLE[PAST]
    cache = [port for port in inputs if _is_cache(port)]
    positions = torch.arange(past, past + new).repeat(batch, 1) if _takes_positions(inputs) else None
    return (
        torch.ones(batch, new, dtype=torch.int64),
        torch.ones(batch, past + new, dtype=torch.int64),
        positions,
        [torch.zeros([axis if isinstance(axis, int) else EXAMPLE[axis] for axis in port.axes]) for port in cache],
    )


def _dynamic(inputs: Sequence[Port]) -> tuple[Any, ...]:
    tokens = {0: Dim.AUTO, 1: Dim.AUTO}
    cache = [port for port in inputs if _is_cache(port)]
    free = [{at: Dim.AUTO for at, axis in enumerate(port.axes) if axis in EXAMPLE} for port in cache]
    return (tokens, tokens, tokens if _takes_positions(inputs) else None, free)


def _is_cache(port: Port) -> bool:
    return port.name.startswith("past_")


def _takes_positions(inputs: Sequence[Port]) -> bool:
    return any(port.name == "position_ids" for port in inputs)


def _weights_to_inputs(model: ir.Model, module: PreTrainedModel) -> dict[str, ir.Value]:
    """What a checkpoint stores becomes graph inputs, buffers too: the optimizer must not look into it."""
    weights = {}
    buffers = [name for name, buffer in module.named_buffers() if isinstance(buffer, FakeTensor)]
    for name in [*(name for name, _ in module.named_parameters(remove_duplicate=False)), *buffers]:
        value = model.graph.initializers.get(f"model.{name}")
        if value is None:
            continue
        model.graph.initializers.pop(f"model.{name}")
        value.const_value = None
        value.name = name
        model.graph.inputs.append(value)
        weights[name] = value
    return weights


def _name_ports(model: ir.Model, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    for value, port in zip(model.graph.inputs, inputs, strict=False):
        _require_free(value, port)
        value.name = port.name
        value.shape = ir.Shape(port.axes)
    for value, port in zip(model.graph.outputs, outputs, strict=True):
        value.name = port.name
        value.shape = ir.Shape(port.axes)


def _require_free(value: ir.Value, port: Port) -> None:
    """A loop over tokens in the model's code makes a trace hold for one length; such a graph is none.

    Raises:
        UnsupportedInput: an axis that should be free has become a number.
    """
    for found, wanted in zip(value.shape or (), port.axes, strict=False):
        if isinstance(found, int) and isinstance(wanted, str):
            raise UnsupportedInput(
                f"the trace fixes the axis `{wanted}` of `{port.name}` to {found}",
                hint="the model's code depends on its value; see docs/adding-a-family.md",
            )


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
