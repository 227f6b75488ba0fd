"""LanguageModel: the language model that a checkpoint contains, and its graphs, their weights still inputs.

A few layers are traced, the others replicated. The filled length of a static cache becomes the input
`nonpad_kv_seqlen` of every `Attention` node (opset 24). The mask hides the unfilled slots already, so results are
equal; a runtime that knows the length can skip them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmconv.causal_lm import require_one_attention, require_rotary
from llmconv.checkpoint import Checkpoint
from llmconv.errors import MalformedInput
from llmconv.export.families import find_input_map, is_multi_modal, known_input_maps
from llmconv.export.graph_spec import GROWING, GraphSpec
from llmconv.export.input_map import InputMap
from llmconv.export.rewrite.fused_operators import fuse_for_target, use_grouped_query_attention
from llmconv.export.rewrite.norms import fuse_norms, rewrite_linear_layers
from llmconv.export.rewrite.replicate import NotIsomorphic, name_everything, replicate, warm_up
from llmconv.export.traced_graph import NodeEditor, TracedGraph, integers, producer, value_named
from llmconv.export.tracing.fake_model import (
    build,
    conversions_of,
    depth,
    embedding_size,
    factors,
    first_alike,
    layer_kinds,
    layers_name,
    load_config,
    period,
    refusing,
    shortened,
)
from llmconv.export.tracing.trace import trace, trace_embeddings
from llmconv.export.weights import expressions, missing_key, require_shape
from llmconv.output.manifest import EMBEDDINGS_ROLE, MTP_ROLE, VISION_ROLE
from llmconv.progress import say
from llmconv.runtime.eager.stored_tensors import kept_in_float32
from llmconv.runtime.extra_inputs import PREVIOUS_HIDDEN, WRITE_INDICES, ExtraInput
from llmconv.tensors import LazyTensor

if TYPE_CHECKING:
    from llmconv.export.vision_graph import TensorNaming


@dataclass(frozen=True)
class LanguageModel:
    """One language model."""

    config: Any  # its transformers config; for a multi-modal checkpoint that of the language model alone
    input_map: InputMap  # the input map of its `model_type`
    # the names of its tensors in a multi-modal checkpoint; None for a checkpoint of a language model
    naming: TensorNaming | None = None
    # size of the embeddings that the graphs take instead of tokens; None if they take tokens
    embeddings: int | None = None
    whole: Any = None  # the config of a multi-modal model whose vision tower is a graph too; None if it is not
    mtp: tuple[str, ...] = ()  # the tensors that the graph of its MTP head may need; empty without that graph

    @property
    def extra_inputs(self) -> dict[str, ExtraInput]:
        return self.input_map.extra_inputs(self.config)

    def kept_in_float32(self, dtype: str) -> re.Pattern[str] | None:
        """Pattern of the names of the tensors that are float32 in a model that transformers loads in `dtype`."""
        if dtype not in ("float16", "bfloat16"):
            return None
        kind = getattr(torch, dtype)
        with refusing("build this model"):
            model = build(shortened(self.config, period(self.config)), kind)
        planned = kept_in_float32(model, kind)
        own = {name for name, one in model.named_parameters() if one.dtype == torch.float32}  # made so by their class
        patterns = {re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)) + "$" for name in own}
        patterns |= {planned.pattern} if planned else set()
        return re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns))) if patterns else None

    def require_fit(self, tensors: Mapping[str, LazyTensor], task: str) -> None:
        """Refuses mismatches that headers show before a trace: another width, or layers without any tensor.

        The weights of a multi-modal checkpoint are compared only after the trace, as all others are again. Raises
        InputRefused: the tensors are not those of the config's layers and embeddings; UnsupportedInput: transformers
        cannot build the model.
        """
        if self.naming:
            return
        with refusing("trace this model"):
            model = build(self.config, task=task)
            layers = f"{layers_name(model)}."
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        stored = {name: tensor.shape for name, tensor in tensors.items()}
        found = expressions(shapes, stored, conversions_of(model), model.base_model_prefix)
        inner = [name for name, _ in model.named_parameters() if name.startswith(layers)]
        numbers = {name: name.removeprefix(layers).partition(".")[0] for name in inner}
        present = {numbers[name] for name in inner if name in found}
        for name in inner:
            if numbers[name] not in present:
                raise missing_key(name)
        table = model.get_input_embeddings().weight
        for name, parameter in model.named_parameters():
            if name in found and (name in numbers or parameter is table):
                require_shape(name, shapes[name], found[name])

    def trace(self, specs: Mapping[str, GraphSpec]) -> tuple[dict[str, TracedGraph], int]:
        """Graphs by role, their weights still inputs, and the number of layers traced; equal specs share one graph.

        Raises UnsupportedInput: transformers or torch cannot build or trace the model.
        """
        built = {spec: build_graph(self.config, self.input_map, spec) for spec in dict.fromkeys(specs.values())}
        layers = max(layers for _, layers in built.values())
        if self.mtp:
            mtp = next(spec for spec in built if spec.task == MTP_ROLE)
            built[mtp] = replace(built[mtp][0], own=self.mtp), 1
        named = self.naming.renamed if self.naming else lambda traced: traced
        graphs = {spec: named(traced) for spec, (traced, _) in built.items()}
        made, precision = {role: graphs[spec] for role, spec in specs.items()}, next(iter(specs.values())).precision
        if self.embeddings:
            padded: tuple[int, ...] = ()
            if self.whole:
                from llmconv.runtime.images.family import placeholders  # noqa: PLC0415 - most models take no images

                padded = placeholders(self.whole)
            with refusing("trace this model"):
                table = trace_embeddings(shortened(self.config, period(self.config)), precision, padded)
                name_everything(table.model)
            # a table alone ignores all other tensors of the checkpoint
            made[EMBEDDINGS_ROLE] = (
                self.naming.renamed(table, table=True) if self.naming else replace(table, ignored=("",))
            )
        if self.whole and self.naming:
            from llmconv.export.vision_graph import build_vision  # noqa: PLC0415 - as above

            made[VISION_ROLE] = build_vision(self.whole, self.naming, precision)
        return made, layers


def open_language_model(checkpoint: Checkpoint, code: Path | None = None, *, embeds: bool = False) -> LanguageModel:
    """The language model of a checkpoint; graphs of a multi-modal one always take embeddings.

    `code` is a trusted folder whose own code builds the model; None for a model class of transformers. Raises
    MalformedInput: `config.json` has no `model_type`; UnsupportedInput: the `model_type` has no input map, or
    transformers cannot read the config.
    """
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise MalformedInput("`config.json` has no `model_type`", hint="copy the config of the original model again")
    if not is_multi_modal(checkpoint.config, embeds=embeds):
        input_map = find_input_map(model_type)
        config = load_config(checkpoint.config, code)
        require_one_attention(config)
        if not code:
            require_rotary(checkpoint.config, config)
        return LanguageModel(config, input_map, embeddings=embedding_size(config) if embeds else None)
    from llmconv.export.vision_graph import WITHOUT, find_naming  # noqa: PLC0415 - as above
    from llmconv.export.vision_towers import VISION_TOWERS  # noqa: PLC0415 - as above

    whole = load_config(checkpoint.config)
    require_rotary(checkpoint.config, whole)
    config = whole.get_text_config(decoder=True)
    # a field of the whole model
    config.tie_word_embeddings = whole.tie_word_embeddings and not _has_own_head(checkpoint)
    for name, value in WITHOUT[model_type].items():
        setattr(config, name, value)
    row = find_input_map(model_type if model_type in known_input_maps() else config.model_type)
    input_map = replace(row, extras=(*row.extras, *row.image_extras), image_extras=())
    tower = whole if model_type in VISION_TOWERS else None
    return LanguageModel(config, input_map, find_naming(checkpoint), embedding_size(config), tower)


def _has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether a composite model has a stored output head that its config, most of all `text_config`, does not tie.

    The default of some composite configs is a tied head, whatever that of their language model is (Mistral 3).
    """
    parts = (checkpoint.config.get("text_config"), checkpoint.config)
    stated = [part["tie_word_embeddings"] for part in parts if part and part.get("tie_word_embeddings") is not None]
    return not any(stated[:1]) and any(name.endswith("lm_head.weight") for name in checkpoint)


def build_graph(config: Any, input_map: InputMap, spec: GraphSpec = GROWING) -> tuple[TracedGraph, int]:
    """The graph of all layers, and the number of layers that were traced.

    Three periods of layers are traced and the last is replicated; if the periods differ, all layers are traced. Raises
    UnsupportedInput: transformers or torch cannot build or trace the model.
    """
    with refusing("trace this model"):
        if spec.task == MTP_ROLE:
            input_map = replace(input_map, extras=(*input_map.extras, PREVIOUS_HIDDEN))
        elif (replicated := _replicated(config, input_map, spec)) is not None:
            return replicated
        traced = trace(config, input_map, spec)
        _rewrite(traced, causal=not input_map.both_ways(config))
        name_everything(traced.model)
        return traced, depth(config)


def _replicated(config: Any, input_map: InputMap, spec: GraphSpec) -> tuple[TracedGraph, int] | None:
    """The extended graph and the number of traced layers; None if that saves nothing, or layers are not alike.

    If the first layers differ from the others (dense layers before layers with experts), they are traced too. If their
    modules do not show a difference, one more period is traced in front of the compared ones.
    """
    total, repeat = depth(config), period(config)
    whole = build(config, task=spec.task)
    first = max(first_alike(layer_kinds(whole), repeat), input_map.first_layers)
    few = warm_up(total, repeat, first) + 2 * repeat
    difference: NotIsomorphic | None = None
    for traced_layers in (few, few + repeat):
        if traced_layers < total:
            short = shortened(config, traced_layers)
            model = build(short, task=spec.task)
            kinds = layer_kinds(model)
            if kinds != layer_kinds(whole)[: len(kinds)] or not factors(model).items() <= factors(whole).items():
                difference = NotIsomorphic("the first layers of a shorter model differ")
                continue
            traced = trace(short, input_map, spec)
            _rewrite(traced, causal=not input_map.both_ways(config))
            try:
                replicate(traced, total, repeat)
            except NotIsomorphic as found:
                difference = found
            else:
                name_everything(traced.model)
                return traced, traced_layers
    if difference is not None:
        say(f"tracing all {total} layers: the layers are not alike ({difference})")
    return None


def _rewrite(traced: TracedGraph, *, causal: bool) -> None:
    rewrite_linear_layers(traced)
    fuse_norms(traced)
    add_filled_length(traced)
    if traced.spec.cache == "shared-buffer" and causal:  # as the fused operator is
        use_grouped_query_attention(traced.model)
    fuse_for_target(traced.model, traced.spec.target, steps=traced.spec.steps)


NONPAD = 6  # index of the input of `Attention`: after query, key, value, mask, past key and past value


def add_filled_length(traced: TracedGraph) -> None:
    """Adds the seventh input to the nodes that read whole `TensorScatter` buffers, in place."""
    graph = traced.model.graph
    write_indices = value_named(graph.inputs, WRITE_INDICES)
    reading = [node for node in graph if node.op_type == "Attention" and producer(node.inputs[1], "TensorScatter")]
    if write_indices is None or not reading:
        return
    tokens, editor = graph.inputs[0], NodeEditor(graph, graph[0])
    assert tokens.shape is not None
    new = tokens.shape[1]
    count = integers(graph, new) if isinstance(new, int) else editor.one("Shape", [tokens], {"start": 1, "end": 2})
    length = editor.one("Add", [write_indices, count])  # `[batch]`
    for node in reading:
        node.resize_inputs(NONPAD + 1)
        node.replace_input_with(NONPAD, length)
