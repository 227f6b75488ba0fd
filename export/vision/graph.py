"""The graph of a whole vision tower, its weights still inputs: a few layers are traced, the others replicated."""

from __future__ import annotations

import copy
from typing import Any

from llmconv.export.graph_spec import FLOAT32
from llmconv.export.rewrite.gemm import rewrite_linear_layers
from llmconv.export.rewrite.node_names import name_everything
from llmconv.export.rewrite.norms import fuse_norms
from llmconv.export.rewrite.replicate import NotIsomorphic, replicate, warm_up
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.tracing.fake_model import refusing
from llmconv.export.tracing.multimodal import TensorNaming
from llmconv.export.vision.tower import VisionTower
from llmconv.export.vision.towers import VISION_TOWERS
from llmconv.export.vision.trace import build_whole, depth_of, is_vision, trace_vision
from llmconv.progress import say


def build_vision(config: Any, naming: TensorNaming, precision: str = FLOAT32) -> TracedGraph:
    """The graph of the tower and the projector, its weights still inputs.

    Args:
        config: the whole model's transformers config.
        naming: the names of the language model's tensors, which the graph does not need.
        precision: dtype that the graph computes in.

    Raises:
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
    """Number of layers of the tower that the features depend on; None for features of several layers.

    Args:
        config: the whole model's config.
    """
    total, at = depth_of(config), getattr(config, "vision_feature_layer", None)
    if at is None:
        return total
    if not isinstance(at, int):
        return None
    return at if at >= 0 else total + 1 + at


def with_layers(config: Any, count: int) -> Any:
    """The config of a model whose features depend on `count` layers of its tower.

    Args:
        config: the whole model's config.
        count: number of layers.
    """
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
