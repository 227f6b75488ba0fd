"""Traces the vision tower and projector of a multimodal model: pixels to the features of images.

The features take the places of the placeholder tokens of the images in `inputs_embeds`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from llmconv.export.graph_spec import GROWING, GraphSpec
from llmconv.export.input_map import Port
from llmconv.export.library_patches import exact_constants, fake_parameters
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.tracing.fake_model import period, shortened, stored_buffers
from llmconv.export.tracing.trace import name_ports, optimized, quiet_libraries, weights_to_inputs
from llmconv.export.vision.tower import TowerInput, VisionTower

LANGUAGE = ("model.language_model.", "model.text_model.", "language_model.", "lm_head.")
"""Prefixes of the parameters of the language model and its head, in the models of transformers 5."""


def is_vision(name: str) -> bool:
    """Whether a parameter belongs neither to the language model nor to its head."""
    return not name.startswith(LANGUAGE)


def build_whole(config: Any, precision: str) -> PreTrainedModel:
    """The whole model with fake parameters, and few layers of the language model.

    Args:
        config: the whole model's config.
        precision: its dtype.
    """
    short = shortened(config, period(config))
    with fake_parameters() as mode:
        model = AutoModelForImageTextToText.from_config(
            short, attn_implementation="eager", dtype=getattr(torch, precision)
        )
    for module, name in list(stored_buffers(model)):  # a checkpoint has them
        with mode:
            module._buffers[name] = torch.empty_like(module.get_buffer(name))
    return model.eval()


def trace_vision(tower: VisionTower, config: Any, model: PreTrainedModel, precision: str) -> TracedGraph:
    """Traces all layers of a model's tower.

    Args:
        tower: of its family.
        config: its config.
        model: the model, with fake parameters.
        precision: its dtype.
    """
    inputs = tower.inputs(config, precision)
    graph = _traced(tower.module(model), inputs)
    weights = weights_to_inputs(graph, model)
    with exact_constants():
        optimized(graph)
    outputs = [
        _output(name, value, symbols, precision)
        for (name, symbols), value in zip(tower.outputs, graph.graph.outputs, strict=True)
    ]
    name_ports(graph, [one.port for one in inputs], outputs)
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


def _traced(module: nn.Module, inputs: Iterable[TowerInput]) -> ir.Model:
    examples = tuple(one.example for one in inputs)
    dynamic = tuple(
        {at: torch.export.Dim.AUTO for at, axis in enumerate(one.port.axes) if isinstance(axis, str)} for one in inputs
    )
    with quiet_libraries(), torch.no_grad():
        program = torch.export.export(module, examples, dynamic_shapes=dynamic, strict=False)
        traced = torch.onnx.export(program, optimize=False, opset_version=GROWING.opset, verbose=False)
    assert traced is not None
    return traced.model


def _output(name: str, value: ir.Value, axes: str | int | tuple[str, ...], precision: str) -> Port:
    assert value.shape is not None
    first = axes if isinstance(axes, tuple) else (axes,)
    return Port(name, precision, (*first, *(int(str(size)) for size in list(value.shape)[len(first) :])))


def layers_of(model: PreTrainedModel, count: int) -> str:
    """Name of the list of the tower's layers.

    Args:
        model: the whole model.
        count: number of layers.
    """
    named: Iterable[tuple[str, nn.Module]] = model.named_modules()
    lists = [
        name for name, part in named if isinstance(part, nn.ModuleList) and len(part) == count and is_vision(f"{name}.")
    ]
    return min(lists, key=len)


def depth_of(config: Any) -> int:
    """Number of layers of the tower.

    Args:
        config: the whole model's config.
    """
    vision = config.vision_config
    return int(getattr(vision, "num_hidden_layers", None) or vision.depth)
