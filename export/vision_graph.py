"""Traces the vision tower and projector of a multimodal model: pixels to the features of images.

A few layers are traced, the others replicated; the weights are still inputs. The language model of such a checkpoint
takes embeddings: `embeddings.onnx` is `input_ids` to `inputs_embeds`, and clients put features of images or sound in
place of the rows of placeholder tokens. The encoders of sound are not exported.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from llmconv.errors import UnsupportedInput
from llmconv.export.graph_spec import FLOAT32, GraphSpec
from llmconv.export.input_map import Port
from llmconv.export.library_patches import fake_parameters
from llmconv.export.rewrite.norms import fuse_norms, rewrite_linear_layers
from llmconv.export.rewrite.replicate import NotIsomorphic, name_everything, replicate, warm_up
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.tracing.fake_model import fake_buffers, period, refusing, shortened
from llmconv.export.tracing.trace import name_ports, plain_graph, weights_to_inputs
from llmconv.export.vision_towers import VISION_TOWERS, VisionTower
from llmconv.progress import say


def build_vision(config: Any, naming: TensorNaming, precision: str = FLOAT32) -> TracedGraph:
    """The graph of the tower and the projector, its weights still inputs.

    `config` is the whole model's; `naming` names the language model's tensors, which the graph does not need. Raises
    UnsupportedInput: transformers or torch cannot build or trace the model.
    """
    with refusing("trace the vision tower"):
        whole, tower = build_whole(config, precision), VISION_TOWERS[config.model_type]
        traced = _replicated(tower, config, precision) or _prepared(trace_vision(tower, config, whole, precision))
        name_everything(traced.model)
    names = {name for name, _ in whole.named_parameters()}
    own = {name: tuple(whole.get_parameter(name).shape) for name in names if is_vision(name)}
    traced.unused = {name: shape for name, shape in own.items() if name not in traced.weights}
    traced.ignored = (f"^{naming.body}", f"^{naming.head}")
    return traced


def _replicated(tower: VisionTower, config: Any, precision: str) -> TracedGraph | None:
    """The graph of a few traced layers and clones of the last; None if that saves nothing, or layers are not alike."""
    total, few = used_layers(config), warm_up(0, 1) + 2
    if total is None or few >= total or not tower.alike:
        return None
    short = with_layers(config, few)
    traced = _prepared(trace_vision(tower, short, build_whole(short, precision), precision))
    traced.num_layers = few
    try:
        replicate(traced, total, 1)
    except NotIsomorphic as found:
        say(f"tracing all {total} layers of the vision tower: they are not alike ({found})")
        return None
    return traced


def used_layers(config: Any) -> int | None:
    """Number of layers of the tower that the features depend on; None for features of several layers."""
    total, at = depth_of(config), getattr(config, "vision_feature_layer", None)
    if at is None:
        return total
    if not isinstance(at, int):
        return None
    return at if at >= 0 else total + 1 + at


def with_layers(config: Any, count: int) -> Any:
    """The config of a whole model whose features depend on `count` layers of its tower."""
    short, at = copy.deepcopy(config), getattr(config, "vision_feature_layer", None)
    layers = count if at is None or at >= 0 else count - 1 - at
    setattr(short.vision_config, "depth" if hasattr(short.vision_config, "depth") else "num_hidden_layers", layers)
    if at is not None and at >= 0:
        short.vision_feature_layer = count
    return short


def _prepared(traced: TracedGraph) -> TracedGraph:
    """The same graph, its nodes rewritten for mapped weights."""
    rewrite_linear_layers(traced)
    fuse_norms(traced)
    return traced


LANGUAGE = ("model.language_model.", "model.text_model.", "language_model.", "lm_head.")
"""Prefixes of the parameters of the language model and its head, in the models of transformers 5."""


def is_vision(name: str) -> bool:
    return not name.startswith(LANGUAGE)


def build_whole(config: Any, precision: str) -> PreTrainedModel:
    """The whole model with fake parameters, and few layers of the language model."""
    short = shortened(config, period(config))
    with fake_parameters() as mode:
        model = AutoModelForImageTextToText.from_config(
            short, attn_implementation="eager", dtype=getattr(torch, precision)
        )
    fake_buffers(model, mode)
    return model.eval()


def trace_vision(tower: VisionTower, config: Any, model: PreTrainedModel, precision: str) -> TracedGraph:
    inputs = {one.port: one.example for one in tower.inputs(config, precision)}
    graph = plain_graph(tower.module(model), inputs)
    weights, outputs = weights_to_inputs(graph, model), []
    for (name, axes), value in zip(tower.outputs, graph.graph.outputs, strict=True):
        first = axes if isinstance(axes, tuple) else (axes,)
        sizes = list(value.shape or ())[len(first) :]
        outputs.append(Port(name, precision, (*first, *(int(str(size)) for size in sizes))))
    name_ports(graph, list(inputs), outputs)
    depth = depth_of(config)
    return TracedGraph(
        graph,
        weights,
        layers_of(model, depth),
        depth,
        {},
        model.base_model_prefix,
        get_model_conversion_mapping(model),
        {},
        (),
        GraphSpec(precision=precision),
    )


def layers_of(model: PreTrainedModel, count: int) -> str:
    """Name of the list of the tower's `count` layers in the whole model."""
    named: Iterable[tuple[str, nn.Module]] = model.named_modules()
    lists = [
        name for name, part in named if isinstance(part, nn.ModuleList) and len(part) == count and is_vision(f"{name}.")
    ]
    return min(lists, key=len)


def depth_of(config: Any) -> int:
    vision = config.vision_config
    return int(getattr(vision, "num_hidden_layers", None) or vision.depth)


WITHOUT: Mapping[str, Mapping[str, float]] = defaultdict(dict, {"aya_vision": {"logit_scale": 1.0}})
"""`model_type` to fields of the language model that the whole model does not apply: its head is a matrix alone."""


@dataclass(frozen=True)
class TensorNaming:
    """The prefixes of the language model's tensors in a multi-modal checkpoint, instead of `model.` and `lm_head.`."""

    body: str
    head: str = "lm_head."
    seen: str = ""  # prefix of a tensor by which a checkpoint with these names is known; empty for `body`

    def name(self, own: str) -> str:
        """The name in the checkpoint of the tensor `own` of the language model."""
        if own.startswith("lm_head."):
            return self.head + own.removeprefix("lm_head.")
        return self.body + own.removeprefix("model.")

    def renamed(self, traced: TracedGraph, *, table: bool = False) -> TracedGraph:
        """The decoder's graph, or that of the embedding `table`, which needs none of the other tensors."""
        own = tuple(self.name(name) for name in traced.weights) if table else (self.body, self.head)
        return replace(
            traced,
            weights={self.name(name): value for name, value in traced.weights.items()},
            tied={self.name(name): self.name(tied) for name, tied in traced.tied.items()},
            unused={self.name(name): shape for name, shape in traced.unused.items()},
            base_prefix=self.body.removesuffix("."),
            own=own,
        )


NAMINGS = (
    TensorNaming("model.language_model."),
    TensorNaming("language_model.model.", "language_model.lm_head."),
    TensorNaming("model.text_model."),
    TensorNaming("model.", seen="model.layers."),
)
"""Names that transformers 5 writes, that transformers 4 wrote, those of idefics3 and others, and those of Qwen2-VL."""


def find_naming(names: Iterable[str]) -> TensorNaming:
    """The naming of the language model's tensors among a checkpoint's names; UnsupportedInput if it is unknown."""
    names = list(names)
    for naming in NAMINGS:
        if any(name.startswith(naming.seen or naming.body) for name in names):
            return naming
    raise UnsupportedInput(
        "unknown tensor names: no tensor of this multi-modal checkpoint has the prefix of a language model",
        hint=f"known prefixes are {', '.join(f'`{naming.body}`' for naming in NAMINGS)}",
    )
