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
from dataclasses import replace
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
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, sliding_window_overlay
from transformers.utils import logging as transformers_logging

from llmconv.errors import LlmconvError, UnsupportedInput, first_line
from llmconv.export.caches import STATE_TYPES
from llmconv.export.caches.traced_layers import PastLayer, TracedCache, define_functions
from llmconv.export.graph_spec import FLOAT32, GROWING, NO_CACHE, GraphSpec
from llmconv.export.input_map import InputMap, Port, decoder_config
from llmconv.export.library_patches import TRANSLATIONS as LIBRARY
from llmconv.export.library_patches import (
    complex_as_pairs,
    constant_erfinv,
    decomposed_once,
    exact_constants,
    fix_program,
    transformers_fixes,
)
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.tracing.attention import ATTENTION, buffer_cache
from llmconv.export.tracing.fake_model import build, conversions_of, depth, layers_name, unchanged_buffers
from llmconv.runtime.extra_inputs import (
    BATCH,
    DOCUMENT,
    FULL,
    INPUTS_EMBEDS,
    MAX_LENGTH,
    PAST,
    SEQUENCE,
    SLIDING,
    TOTAL,
    WRITE_INDICES,
    ExtraInput,
    is_past,
    is_state,
    is_token_input,
    require_parameters,
)
from llmconv.runtime.library_patches import cache_parameter, masks_new_tokens
from llmconv.runtime.onnxruntime.guard import EXACT
from llmconv.tensors import BY_NAME

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
        self._extras = extras or {}
        self._both_ways = next((extra for extra in (extras or {}).values() if extra.both_ways), None)
        self._cache_name, self._masks_new = cache_parameter(model.forward), masks_new_tokens(model)

    def forward(
        self,
        input_ids: Tensor,  # int64 [batch, sequence], or embeddings, of the model's dtype, [batch, sequence, hidden]
        attention_mask: Tensor,  # int64 [batch, total]
        position_ids: Tensor | None,  # int64 [batch, sequence]; None for families that count tokens themselves
        write_indices: Tensor | None,  # first slot of the new tokens in a static cache, int64 [batch]; otherwise None
        extras: list[Tensor],  # values of the extra inputs that are not fixed, in their order
        past: list[Tensor],  # tensors of the cache
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits `[batch, sequence, vocab]`, the hidden state for an MTP head, and the cache with the new tokens."""
        cache = self._cache(past, input_ids, attention_mask, write_indices)
        others = self._named(extras, input_ids, attention_mask)
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
        hidden = {"output_hidden_states": True} if self._spec.hidden else {}
        result = self.model(**given, **hidden, use_cache=True, **{self._cache_name: cache})
        states = [result.hidden_states[-1]] if self._spec.hidden else []
        return result.logits.to(getattr(torch, self._spec.logits)), [*states, *cache.tensors()]

    def _named(self, given: Sequence[Tensor], tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The values of all extra inputs by name: those that are not fixed are `given`, the others their default.

        The symbolic axes of `given` are declared to have the sizes of tokens and mask, so that the trace has one symbol
        for each.
        """
        sizes = {BATCH: mask.shape[0], SEQUENCE: tokens.shape[1], TOTAL: mask.shape[1]}
        sizes[PAST] = sizes[TOTAL] - sizes[SEQUENCE]
        values, left = {}, iter(given)
        for name, extra in self._extras.items():
            if name in self._spec.fixed_inputs:
                values[name] = torch.full(shape_of(extra, sizes), extra.default, dtype=getattr(torch, extra.dtype))  # type: ignore[arg-type]
                continue
            values[name] = next(left)
            for at, axis in enumerate(extra.declared):
                if isinstance(axis, str):
                    torch._check(values[name].shape[at] == sizes[axis])  # type: ignore[no-untyped-call]
        return values

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
        if self._spec.cache == GROWING.cache:  # all keys and values have one length, one symbol in the trace
            for tensor, name in zip(past, self._past, strict=True):
                if not is_state(name):
                    torch._check(tensor.shape[-2] == mask.shape[1] - input_ids.shape[1])  # type: ignore[no-untyped-call]
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


def _single_pass(model: Any, input_map: InputMap, spec: GraphSpec) -> nn.Module:
    from llmconv.export.tracing.single_pass import SinglePass  # noqa: PLC0415 - of graphs without a cache

    return SinglePass(model, input_map, spec)


def trace(config: Any, input_map: InputMap, spec: GraphSpec = GROWING) -> TracedGraph:
    """Traces all layers of a model, whose config is usually shortened; one without a cache is `SinglePass`.

    Raises UnsupportedInput: the model's code fixes an axis that must be dynamic.
    """
    with quiet_libraries(), torch.no_grad():
        model = build(config, getattr(torch, spec.precision), spec.task)
        single = spec.cache == NO_CACHE
        extras = {} if single else input_map.extra_inputs(model.config)
        if not single:
            require_parameters(model.forward, extras)
        with complex_as_pairs(), unchanged_buffers(model):
            found = input_map.inputs(config), input_map.outputs(config)
            found = found if single else ports_of(model, input_map, extras)
        known = {"input_ids", "attention_mask", "position_ids", *extras}
        if unknown := [port.name for port in found[0] if port.name not in known and not is_past(port.name)]:
            raise UnsupportedInput(  # an input map adds it to `inputs` alone: nothing would feed it
                f"the input map has an unsupported input `{unknown[0]}`",
                hint="declare it as an `ExtraInput` in `extras`",
            )
        inputs, outputs = spec.inputs(found[0]), spec.outputs(found[1])
        past = [port.name for port in inputs if is_cache(port)]
        module = _single_pass(model, input_map, spec) if single else CacheAsTensors(model, past, spec, extras)
        model.set_attn_implementation(ATTENTION)
        traceable = input_map.kind.traceable(sys.modules[type(model).__module__])
        arguments, dynamic = (given[: 3 if single else None] for given in example_arguments(inputs))
        with (
            transformers_fixes(),
            complex_as_pairs(),
            constant_erfinv(),
            traceable,
            unchanged_buffers(model) as constants,
        ):
            if extras:  # first on fake numbers; sizes of different axes differ, so that a wrong axis shows
                mode: Any = next(model.parameters()).fake_mode
                with fitting(extras), mode, torch.no_grad():
                    module(*_pytree.tree_map_only(Tensor, mode.from_tensor, arguments))
            program = torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False)
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
    if single and spec.task:
        from llmconv.export.tracing.single_pass import result_ports  # noqa: PLC0415 - of graphs without a cache

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
    graph = plain_graph(EmbeddingTable(model, placeholders), {tokens: _example(tokens)})
    return _traced(graph, model, config, GraphSpec(precision=precision), [tokens], [embedded])


def plain_graph(module: nn.Module, inputs: Mapping[Port, Tensor]) -> ir.Model:
    """The graph of a module without a cache; `inputs` are its arguments by port."""
    with quiet_libraries(), torch.no_grad():
        dynamic = tuple(map(axes, inputs))
        program = torch.export.export(module, tuple(inputs.values()), dynamic_shapes=dynamic, strict=False)
        onnx_program = torch.onnx.export(program, optimize=False, opset_version=GROWING.opset, verbose=False)
    assert onnx_program is not None
    return onnx_program.model


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
    # tensors that transformers ignores when it loads this model: other heads, and image and audio modules
    alone = decoder_config(config) is not config and decoder_config(model.config) is model.config
    ignored = (*(model._keys_to_ignore_on_load_unexpected or ()), *((OTHER_MODALITIES,) if alone else ()))
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
        ignored,
    )


def weights_to_inputs(model: ir.Model, module: PreTrainedModel) -> dict[str, ir.Value]:
    """Makes stored parameters and buffers graph inputs, in place, then folds constants and removes unused nodes.

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
    with exact_constants():
        onnxscript.optimizer.optimize(model)
    return weights


def name_ports(model: ir.Model, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    """Gives the graph's inputs, which weights may follow, and outputs their names and axes, in place and in order.

    Raises UnsupportedInput: the trace fixed an axis that must be dynamic, as of a loop over tokens in the model's code,
    does not use an extra input, to which a request could give any value, or changes the dtype of the cache, which the
    next call could not continue.
    """
    for value, port in zip(model.graph.inputs, inputs, strict=False):
        for found, wanted in zip(value.shape or (), port.axes, strict=False):
            if isinstance(found, int) and isinstance(wanted, str):
                raise UnsupportedInput(
                    f"the trace fixes the dynamic axis `{wanted}` of `{port.name}` to {found}",
                    hint="the model's code depends on its value; see docs/adding-a-family.md",
                )
        if not is_tokens(port) and not is_cache(port) and not value.uses():
            raise UnsupportedInput(
                f"the logits do not depend on the extra input `{port.name}`",
                hint="leave it out of the input map; see docs/adding-a-family.md",
            )
        value.name = port.name
        value.shape = ir.Shape(port.axes)
    for value, port in zip(model.graph.outputs, outputs, strict=True):
        if value.dtype is not None and value.dtype.numpy() != BY_NAME[port.dtype].numpy:
            raise UnsupportedInput(
                f"the trace returns `{port.name}` in {value.dtype.name.lower()} instead of {port.dtype}",
                hint="export with `--precision float32`",
            )
        value.name = port.name
        value.shape = ir.Shape(port.axes)


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
    given = (one for node in program.graph.nodes for one in _pytree.tree_leaves((node.args, node.kwargs)))
    scalars = np.array(sorted({one for one in given if isinstance(one, float)}), dtype=np.float64)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in HALVES and tensor.size == 1:
            stored = tensor.numpy().reshape(())
            with np.errstate(over="ignore"):
                found = scalars[scalars.astype(stored.dtype) == stored]
            if len(found) == 1 and float(found[0]) != float(stored):  # the only number whose rounding is stored
                tensor.metadata_props[EXACT] = repr(float(found[0]))


def expm1(x: Any) -> Any:
    """`exp(x) - 1` as `tanh(x / 2) * (exp(x) + 1)`, which does not cancel near 0; torch computes it in float32."""
    half, one = (op.CastLike(op.Constant(value_float=number), x) for number in (0.5, 1.0))
    return op.Mul(op.Tanh(op.Mul(x, half)), op.Add(op.Exp(x), one))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {**LIBRARY, torch.ops.aten.expm1.default: expm1}
"""Operation of torch to a function of onnxscript: ours, and transformers' corrections."""


EXAMPLE = {BATCH: 2, SEQUENCE: 3, PAST: 5, TOTAL: 8, MAX_LENGTH: 13}
"""Example sizes of dynamic axes; none is 0 or 1, for which torch.export would specialize the axis."""


def example_arguments(inputs: Sequence[Port]) -> list[tuple[Any, ...]]:
    """Arguments of the traced module, and their dynamic axes in the same structure.

    One per token input, None for missing ones, then the extra inputs as one list and the cache as another.
    """
    made = {port.name: (_example(port), axes(port)) for port in inputs}
    given = {port.name: made[port.name] for port in inputs if is_tokens(port)}  # positions on three axes are an extra
    first = "input_ids" if "input_ids" in given else INPUTS_EMBEDS
    tokens = [given.get(name, (None, None)) for name in (first, "attention_mask", "position_ids", WRITE_INDICES)]
    extras = [made[port.name] for port in inputs if not is_tokens(port) and not is_cache(port)]
    cache = [made[port.name] for port in inputs if is_cache(port)]
    return [(*(one[at] for one in tokens), *([one[at] for one in part] for part in (extras, cache))) for at in (0, 1)]


def _example(port: Port) -> Tensor:
    """Ones for tokens, else zeros; a fixed shape is one number expanded: the buffer may be larger than memory."""
    shape, dtype = [axis if isinstance(axis, int) else EXAMPLE[axis] for axis in port.axes], getattr(torch, port.dtype)
    if is_tokens(port):
        return torch.ones(shape, dtype=dtype)
    is_fixed = port.axes == tuple(shape)
    return torch.zeros(1, dtype=dtype).expand(shape) if is_fixed else torch.zeros(shape, dtype=dtype)


def axes(port: Port) -> dict[int, Any]:
    return {at: Dim.AUTO for at, axis in enumerate(port.axes) if isinstance(axis, str)}


def is_tokens(port: Port) -> bool:
    """Whether an input has one value for each token, or where tokens are written."""
    return is_token_input(port.name, len(port.axes))


def is_cache(port: Port) -> bool:
    return port.name.startswith("past_")


def ports_of(
    model: PreTrainedModel, input_map: InputMap, extras: Mapping[str, ExtraInput]
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Inputs and outputs of a graph, with the key and value shapes of every layer of the model, on fake weights.

    A config does not declare the shapes reliably: families have many names for key/value heads, multi-head latent
    attention has values of another size than keys, and layers may share a cache or have different heads.
    """
    inputs, outputs = input_map.inputs(model.config), input_map.outputs(model.config)
    if input_map.kind.mixed:
        return inputs, outputs
    if kinds := STATE_TYPES & set(getattr(decoder_config(model.config), "layer_types", None) or ()):
        raise UnsupportedInput(
            f"unsupported cache: layers of type `{min(kinds)}` keep a state that the input map does not declare",
            hint="add the kind to its row in `export/families.py`; see docs/adding-a-family.md",
        )
    cache, tokens = Cache(layer_class_to_replicate=PastLayer), torch.ones(2, 3, dtype=torch.int64)
    with fitting(extras), next(model.parameters()).fake_mode, torch.no_grad():
        sizes, given = {BATCH: 2, SEQUENCE: 3, PAST: 0, TOTAL: 3}, {}
        for name, extra in extras.items():
            dtype = model.dtype if extra.dtype == "float32" else getattr(torch, extra.dtype)
            given[name] = torch.zeros(shape_of(extra, sizes), dtype=dtype)
        model(input_ids=tokens, attention_mask=tokens, past_key_values=cache, use_cache=True, **given)
    shapes = [[(part.shape[1], part.shape[3]) for part in (layer.keys, layer.values)] for layer in cache.layers]
    return with_shapes(inputs, "past_key_values", PAST, shapes), with_shapes(outputs, "present", TOTAL, shapes)


def shape_of(extra: ExtraInput, sizes: Mapping[str, int]) -> list[int]:
    return [sizes[axis] if isinstance(axis, str) else axis for axis in extra.declared]


def with_shapes(
    ports: Sequence[Port], prefix: str, length: str, shapes: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Port, ...]:
    """The ports of a graph with these (heads, size of one head) of key and value, by layer."""
    like = next((port for port in ports if port.name.startswith(f"{prefix}.")), ports[0])
    cache = [
        replace(like, name=f"{prefix}.{layer}.{part}", axes=(like.axes[0], heads, length, size))
        for layer, pair in enumerate(shapes)
        for part, (heads, size) in zip(("key", "value"), pair, strict=True)
    ]
    return (*(port for port in ports if not port.name.startswith(f"{prefix}.")), *cache)


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
