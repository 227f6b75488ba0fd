"""Traces the eager model on fake weights to an ONNX graph whose weights are graph inputs.

Some models have masks in which tokens, such as those of an image, attend to each other in both directions.
transformers' whole model makes them from the kind of each token; its text model takes them ready, by layer type.

The exact numbers behind half-precision constants are recorded. torch multiplies a float16 tensor by 0.7071 exactly and
rounds the product; the exporter rounds the number. A copy of the graph in float32, as `verify` makes, needs the number
itself. So the constant gets it in ONNX's `TensorProto.metadata_props`, which runtimes ignore.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnxscript import opset18 as op
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim
from torch.utils import _pytree
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, sliding_window_overlay
from transformers.utils import logging as transformers_logging

from llmconv.errors import UnsupportedInput
from llmconv.export.caches.traced_layers import TracedCache, define_functions
from llmconv.export.graph_spec import FLOAT32, GROWING, NO_CACHE, GraphSpec
from llmconv.export.input_map import InputMap, Port, decoder_config
from llmconv.export.library_patches import TRANSLATIONS as LIBRARY
from llmconv.export.library_patches import (
    complex_as_pairs,
    decomposed_once,
    exact_constants,
    fix_program,
    transformers_fixes,
)
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.tracing.attention import ATTENTION, buffer_cache
from llmconv.export.tracing.extra_tensors import ExtraTensors, extras_of, ports_of, require_declared, require_fit
from llmconv.export.tracing.fake_model import build, conversions_of, depth, layers_name, unchanged_buffers
from llmconv.export.tracing.single_pass import SinglePass, result_ports
from llmconv.runtime.extra_inputs import BATCH, FULL, MAX_LENGTH, PAST, SEQUENCE, SLIDING, TOTAL, ExtraInput, is_state
from llmconv.runtime.library_patches import cache_parameter, masks_new_tokens
from llmconv.runtime.onnxruntime.graph import is_token_input
from llmconv.runtime.onnxruntime.session_settings import EXACT
from llmconv.runtime.onnxruntime.shared_buffers import INPUTS_EMBEDS, WRITE_INDICES
from llmconv.tensors import BY_NAME, Array

OTHER_MODALITIES = r"(^|\.)(vision|visual|image|audio|speech|multi_modal|multimodal|mm_|vq)"
"""Names of image and audio modules in a checkpoint that contains more than a text model."""


class CacheAsTensors(nn.Module):
    """The eager model with its cache as a flat list of tensors, in the order of the input names `past`."""

    def __init__(
        self,
        model: PreTrainedModel,
        past: Sequence[str],
        spec: GraphSpec,
        extras: Mapping[str, ExtraInput] | None = None,
    ) -> None:
        super().__init__()
        self.model, self._past, self._spec = model, past, spec
        self._extras = ExtraTensors(extras or {}, spec.fixed_inputs)
        self._both_ways = next((extra for extra in (extras or {}).values() if extra.both_ways), None)
        self._cache_name, self._masks_new = cache_parameter(model.forward), masks_new_tokens(model)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None,
        write_indices: Tensor | None,
        extras: list[Tensor],
        past: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits `[batch, sequence, vocab]`, and the cache with the new tokens.

        Args:
            input_ids: int64 `[batch, sequence]`, or embeddings, of the model's dtype, `[batch, sequence, hidden]`.
            attention_mask: int64 `[batch, total]`.
            position_ids: int64 `[batch, sequence]`; None for families that count tokens themselves.
            write_indices: first slot of the new tokens in a static cache, int64 `[batch]`; otherwise None.
            extras: values of the extra inputs that are not fixed, in their order.
            past: tensors of the cache.
        """
        cache = self._cache(past, input_ids, attention_mask, write_indices)
        others = self._extras.named(extras, input_ids, attention_mask)
        new, total = (
            torch.ones_like(tokens[0]).sum() for tokens in (attention_mask[:, -input_ids.shape[1] :], attention_mask)
        )
        TracedCache.is_step = (new == 1) & (total > 1)
        if self._masks_new:
            attention_mask = attention_mask[:, -input_ids.shape[1] :]
        tokens = INPUTS_EMBEDS if self._spec.embeddings else "input_ids"
        given: dict[str, Any] = {tokens: input_ids, "attention_mask": attention_mask, **others}
        if position_ids is not None:
            given["position_ids"] = position_ids
        if self._both_ways:
            given["attention_mask"] = self._masks(given, self._both_ways, cache)
        result = self.model(**given, use_cache=True, **{self._cache_name: cache})
        return result.logits.to(getattr(torch, self._spec.logits)), cache.tensors()

    def _masks(self, given: dict[str, Any], extra: ExtraInput, cache: Any) -> Tensor | dict[str, Tensor]:
        kinds = given.pop(extra.name)
        embedded = (
            given[INPUTS_EMBEDS] if self._spec.embeddings else self.model.get_input_embeddings()(given["input_ids"])
        )
        known = {name: given.get(name) for name in ("attention_mask", "position_ids")}
        return masks_of(
            self.model.config, kinds, extra.both_ways, {"inputs_embeds": embedded, "past_key_values": cache, **known}
        )

    def _cache(self, past: list[Tensor], input_ids: Tensor, mask: Tensor, write_indices: Tensor | None) -> Any:
        if self._spec.cache == GROWING.cache:
            _same_length(past, self._past, mask.shape[1] - input_ids.shape[1])
            return TracedCache(self._past, past, depth(self.model.config))
        return buffer_cache(past, input_ids, mask, write_indices)


class EmbeddingTable(nn.Module):
    """The embedding table alone; tokens in `placeholders` are embedded as padding."""

    def __init__(self, model: PreTrainedModel, placeholders: Sequence[int] = ()) -> None:
        super().__init__()
        self.model, self._placeholders = model, placeholders

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeddings of tokens, `[batch, sequence, hidden]`."""
        for token in self._placeholders:
            input_ids = torch.where(input_ids == token, self.model.config.pad_token_id, input_ids)
        embedded: Tensor = self.model.get_input_embeddings()(input_ids)
        return embedded


def _same_length(tensors: Sequence[Tensor], names: Sequence[str], length: Any) -> None:
    """Declares that all keys and values have one length, so that the trace has one symbol for it."""
    for tensor, name in zip(tensors, names, strict=True):
        if not is_state(name):
            torch._check(tensor.shape[-2] == length)  # type: ignore[no-untyped-call]


def trace(config: Any, input_map: InputMap, spec: GraphSpec = GROWING) -> TracedGraph:
    """Traces all layers of a model, whose config is usually shortened; one without a cache is `SinglePass`.

    Raises UnsupportedInput: the model's code fixes an axis that must be dynamic.
    """
    with quiet_libraries(), torch.no_grad():
        model = build(config, getattr(torch, spec.precision), spec.task)
        single = spec.cache == NO_CACHE
        with complex_as_pairs(), unchanged_buffers(model):
            extras = {} if single else extras_of(model, input_map)
            found = (
                (input_map.inputs(config), input_map.outputs(config)) if single else ports_of(model, input_map, extras)
            )
        require_declared(found[0], extras)
        inputs, outputs = spec.inputs(found[0]), spec.outputs(found[1])
        past = [port.name for port in inputs if is_cache(port)]
        module = SinglePass(model, input_map, spec) if single else CacheAsTensors(model, past, spec, extras)
        model.set_attn_implementation(ATTENTION)
        traceable = input_map.kind.traceable(sys.modules[type(model).__module__])
        arguments = example_arguments(inputs)[: 3 if single else None]
        with transformers_fixes(), complex_as_pairs(), traceable, unchanged_buffers(model) as constants:
            require_fit(module, arguments, extras)
            program = torch.export.export(
                module, arguments, dynamic_shapes=dynamic_axes(inputs)[: 3 if single else None], strict=False
            )
            program.constants.update({name: constants[name] for name in program.constants.keys() & constants.keys()})
            fix_program(program.graph_module)
            with decomposed_once():
                onnx_program = torch.onnx.export(
                    program,
                    optimize=False,
                    opset_version=spec.opset,
                    verbose=False,
                    custom_translation_table=TRANSLATIONS,
                )
    assert onnx_program is not None
    if spec.task:
        outputs = result_ports(spec, onnx_program.model)
    traced = _traced(onnx_program.model, model, config, spec, inputs, outputs, input_map.kind.functions)
    record_exact_scalars(traced.model, program)
    return traced


def trace_embeddings(config: Any, precision: str = FLOAT32, placeholders: Sequence[int] = ()) -> TracedGraph:
    """The embedding table as a graph: `input_ids` to `inputs_embeds` `[batch, sequence, hidden]` of dtype `precision`.

    Tokens in `placeholders` are embedded as padding.
    """
    tokens = Port("input_ids", "int64", (BATCH, SEQUENCE))
    with quiet_libraries(), torch.no_grad():
        model = build(config, getattr(torch, precision))
        size = int(model.get_input_embeddings().weight.shape[1])
        embedded = Port(INPUTS_EMBEDS, precision, (BATCH, SEQUENCE, size))
        program = torch.export.export(
            EmbeddingTable(model, placeholders),
            (torch.ones(sizes(tokens), dtype=torch.int64),),
            dynamic_shapes=(axes(tokens),),
            strict=False,
        )
        onnx_program = torch.onnx.export(program, optimize=False, opset_version=GROWING.opset, verbose=False)
    assert onnx_program is not None
    spec = GraphSpec(precision=precision)
    return _traced(onnx_program.model, model, config, spec, [tokens], [embedded])


def _traced(
    graph_model: ir.Model,
    model: PreTrainedModel,
    config: Any,
    spec: GraphSpec,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    functions: Mapping[str, str] | None = None,
) -> TracedGraph:
    weights = weights_to_inputs(graph_model, model)
    with exact_constants():
        optimized(graph_model)
    define_functions(graph_model, functions or {})
    token_axes = tuple(str(axis) for axis in (graph_model.graph.inputs[0].shape or ())[:2])
    name_ports(graph_model, inputs, outputs)
    return TracedGraph(
        graph_model,
        weights,
        layers_name(model),
        depth(config),
        dict(model.all_tied_weights_keys),
        model.base_model_prefix,
        conversions_of(model),
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in weights},
        token_axes,
        spec,
        _ignored(model, config),
    )


def optimized(model: ir.Model) -> None:
    """Folds constants and removes what no output needs, in place."""
    onnxscript.optimizer.optimize(model)


def _ignored(model: PreTrainedModel, config: Any) -> tuple[str, ...]:
    """Tensors that transformers ignores when it loads this model: other heads, and image and audio modules."""
    alone = decoder_config(config) is not config and decoder_config(model.config) is model.config
    return (*(model._keys_to_ignore_on_load_unexpected or ()), *((OTHER_MODALITIES,) if alone else ()))


def weights_to_inputs(model: ir.Model, module: PreTrainedModel) -> dict[str, ir.Value]:
    """Makes stored parameters and buffers graph inputs, in place, so that the optimizer does not fold them.

    `model` is the exporter's graph of a module whose attribute `model` is `module`.
    """
    weights = {}
    buffers = [name for name, buffer in module.named_buffers() if isinstance(buffer, FakeTensor)]
    for name in [*(name for name, _ in module.named_parameters(remove_duplicate=False)), *buffers]:
        value = model.graph.initializers.get(f"model.{name}")
        if value is None:
            continue
        model.graph.initializers.pop(f"model.{name}")
        if not value.uses():
            continue  # the embedding table of a decoder that takes embeddings
        value.const_value = None
        value.name = name
        model.graph.inputs.append(value)
        weights[name] = value
    return weights


def name_ports(model: ir.Model, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    """Gives the graph's inputs, which weights may follow, and outputs their names and axes, in place and in order.

    Raises UnsupportedInput: the trace fixed an axis that must be dynamic.
    """
    for value, port in zip(model.graph.inputs, inputs, strict=False):
        _require_dynamic(value, port)
        _require_used(value, port)
        value.name = port.name
        value.shape = ir.Shape(port.axes)
    for value, port in zip(model.graph.outputs, outputs, strict=True):
        _require_dtype(value, port)
        value.name = port.name
        value.shape = ir.Shape(port.axes)


def _require_dynamic(value: ir.Value, port: Port) -> None:
    """Refuses a trace for one length only, which a loop over tokens in the model's code causes."""
    for found, wanted in zip(value.shape or (), port.axes, strict=False):
        if isinstance(found, int) and isinstance(wanted, str):
            raise UnsupportedInput(
                f"the trace fixes the dynamic axis `{wanted}` of `{port.name}` to {found}",
                hint="the model's code depends on its value; see docs/adding-a-family.md",
            )


def _require_used(value: ir.Value, port: Port) -> None:
    """Refuses an extra input that the model ignores: a request could give it any value."""
    if port in extra_ports([port]) and not value.uses():
        raise UnsupportedInput(
            f"the logits do not depend on the extra input `{port.name}`",
            hint="leave it out of the input map; see docs/adding-a-family.md",
        )


def _require_dtype(value: ir.Value, port: Port) -> None:
    """Refuses a trace whose cache changes its dtype, which the next call could not continue."""
    if value.dtype is not None and value.dtype.numpy() != BY_NAME[port.dtype].numpy:
        raise UnsupportedInput(
            f"the trace returns `{port.name}` in {value.dtype.name.lower()} instead of {port.dtype}",
            hint="export with `--precision float32`",
        )


@contextmanager
def quiet_libraries() -> Iterator[None]:
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


Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key, of row, head, query index and key index."""


def masks_of(
    config: Any, kinds: Tensor, types: Collection[str], given: Mapping[str, Any]
) -> Tensor | dict[str, Tensor]:
    """The mask, or that of each type of layers: causal or in the same block, and in the window for those that slide.

    `kinds`: which new tokens belong to a block, 1 or 0, int64 `[batch, sequence]`; neighbors form one block. `types`:
    types of layers in which tokens see their block (`ExtraInput.both_ways`); the others are causal. `given`: arguments
    of `create_causal_mask`: embeddings, mask, cache and positions.
    """
    block = same_block(kinds)

    def mask(kind: str) -> Tensor:
        window = sliding_window_overlay(config.sliding_window) if kind == SLIDING else None
        visible = block if kind in types else None
        made: Tensor = create_causal_mask(config, or_mask_function=visible, and_mask_function=window, **given)
        return made

    kinds_of_layers = dict.fromkeys(getattr(config, "layer_types", None) or ())
    return {kind: mask(kind) for kind in kinds_of_layers} or mask(FULL)


def same_block(kinds: Tensor) -> Visible:
    """Whether two new tokens belong to the same block of `kinds`, as in `masks_of`; no token of the past does."""
    inside = kinds == 1
    starts = inside & ~torch.nn.functional.pad(inside, (1, -1))
    blocks = torch.where(inside, starts.to(torch.int64).cumsum(dim=1), 0)
    last = kinds.shape[1] - 1

    def visible(rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        first = queries[:, :, :1]
        new = keys - first
        of_keys = torch.where((new >= 0) & (new <= last), blocks[rows, new.clamp(0, last)], 0)
        of_queries = blocks[rows, queries - first]
        return (of_queries == of_keys) & (of_queries > 0)

    return visible


HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def record_exact_scalars(model: ir.Model, program: Any) -> None:
    """Adds the exact numbers in a `torch.export.ExportedProgram` to the constants of its optimized graph, in place."""
    scalars = np.array(sorted(set(_scalars(program))), dtype=np.float64)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in HALVES and tensor.size == 1:
            number = _exact(tensor.numpy().reshape(()), scalars)
            if number is not None:
                tensor.metadata_props[EXACT] = repr(number)


def _scalars(program: Any) -> Iterator[float]:
    for node in program.graph.nodes:
        for given in _pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(given, float):
                yield given


def _exact(stored: Array, scalars: Array) -> float | None:
    """The only number whose rounding is stored; None if that is the stored number itself, or none or several are."""
    with np.errstate(over="ignore"):
        found = scalars[scalars.astype(stored.dtype) == stored]
    return float(found[0]) if len(found) == 1 and float(found[0]) != float(stored) else None


def expm1(x: Any) -> Any:
    """`exp(x) - 1` as `tanh(x / 2) * (exp(x) + 1)`, which does not cancel near 0; torch computes it in float32."""
    half, one = (op.CastLike(op.Constant(value_float=number), x) for number in (0.5, 1.0))
    return op.Mul(op.Tanh(op.Mul(x, half)), op.Add(op.Exp(x), one))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {**LIBRARY, torch.ops.aten.expm1.default: expm1}
"""Operation of torch to a function of onnxscript: ours, and transformers' corrections."""


EXAMPLE = {BATCH: 2, SEQUENCE: 3, PAST: 5, TOTAL: 8, MAX_LENGTH: 13}
"""Example sizes of dynamic axes; none is 0 or 1, for which torch.export would specialize the axis."""


def example_arguments(inputs: Sequence[Port]) -> tuple[Any, ...]:
    """Arguments of the traced module: one per token input, the extra inputs as one list and the cache as another."""
    tokens = {port.name: _ones(port) for port in inputs if is_tokens(port)}
    extras = [_zeros(port) for port in extra_ports(inputs)]
    cache = [_zeros(port) for port in inputs if is_cache(port)]
    return (*_arguments(tokens), extras, cache)


def _ones(port: Port) -> Tensor:
    return torch.ones(sizes(port), dtype=getattr(torch, port.dtype))


def extra_ports(inputs: Sequence[Port]) -> list[Port]:
    return [port for port in inputs if not is_tokens(port) and not is_cache(port)]


def _zeros(port: Port) -> Tensor:
    """Zeros; a fixed shape is one number expanded, because the buffer may be larger than memory."""
    shape, dtype = sizes(port), getattr(torch, port.dtype)
    is_fixed = port.axes == tuple(shape)
    return torch.zeros(1, dtype=dtype).expand(shape) if is_fixed else torch.zeros(shape, dtype=dtype)


def dynamic_axes(inputs: Sequence[Port]) -> tuple[Any, ...]:
    """The dynamic axes of these arguments, in the same structure."""
    tokens = {port.name: axes(port) for port in inputs if is_tokens(port)}
    extras = [axes(port) for port in extra_ports(inputs)]
    return (*_arguments(tokens), extras, [axes(port) for port in inputs if is_cache(port)])


def _arguments(tokens: dict[str, Any]) -> list[Any]:
    """The values of the token inputs in the order of the module's arguments; None for missing inputs."""
    first = tokens.get("input_ids", tokens.get(INPUTS_EMBEDS))
    return [first, *(tokens.get(name) for name in ("attention_mask", "position_ids", WRITE_INDICES))]


def axes(port: Port) -> dict[int, Any]:
    return {at: Dim.AUTO for at, axis in enumerate(port.axes) if isinstance(axis, str)}


def sizes(port: Port) -> list[int]:
    return [axis if isinstance(axis, int) else EXAMPLE[axis] for axis in port.axes]


def is_tokens(port: Port) -> bool:
    """Whether an input has one value for each token, or where tokens are written."""
    return is_token_input(port.name, len(port.axes))


def is_cache(port: Port) -> bool:
    return port.name.startswith("past_")
