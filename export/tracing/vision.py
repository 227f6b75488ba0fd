"""The vision tower and projector of a multi-modal model as a graph: `pixel_values` to the features of images.

    vision.onnx   pixel_values [images, channels, height, width] -> image_features [images, tokens, hidden]

The features take the places of the placeholder tokens of the images in `inputs_embeds`. The towers in the table take
images of one size, that of `vision_config`, and return as many features for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from llmconv.export.graph_spec import GROWING, GraphSpec
from llmconv.export.input_map import Port
from llmconv.export.library_patches import exact_constants, fake_parameters
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.tracing.fake_model import period, shortened
from llmconv.export.tracing.trace import name_ports, optimized, quiet_libraries, weights_to_inputs
from llmconv.runtime.onnxruntime.vision import IMAGE_FEATURES, PIXEL_VALUES

IMAGES = "num_images"
"""The symbolic axis of the graph."""

PROJECTOR = "multi_modal_projector"


@dataclass(frozen=True)
class VisionTower:
    """A family's tower.

    Attributes:
        alike: all of its layers are alike, so a few are traced and the others replicated.
    """

    alike: bool = True


VISION_TOWERS: dict[str, VisionTower] = {
    "aya_vision": VisionTower(),
    "got_ocr2": VisionTower(alike=False),  # layers with windows between layers without
    "internvl": VisionTower(),
    "llava": VisionTower(),
    "vipllava": VisionTower(),
}
"""By `model_type`; the projector's output is the features of an image, whatever else is in the image or the prompt."""


class _Captured:
    """Stands for the projector's output in the code after it, which would count the images one by one."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(())

    def reshape(self, *shape: int) -> _Captured:
        """The same."""
        return self


class ImageFeatures(nn.Module):
    """The model's features of images, up to the output of its projector."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [images, tokens, hidden] of `pixel_values` [images, channels, height, width]."""
        found: list[Tensor] = []

        def capture(module: nn.Module, given: Any, output: Tensor) -> _Captured:
            found.append(output)
            return _Captured()

        hook = self.model.model.get_submodule(PROJECTOR).register_forward_hook(capture)
        try:
            self.model.model.get_image_features(pixel_values=pixel_values)
        finally:
            hook.remove()
        features = found[0]
        return features.reshape(pixel_values.shape[0], -1, features.shape[-1])


def is_vision(name: str) -> bool:
    """Whether a parameter belongs neither to the language model nor to its head."""
    return not name.startswith(("model.language_model.", "model.text_model.", "lm_head."))


def build_whole(config: Any, precision: str) -> PreTrainedModel:
    """The whole model with fake parameters, and few layers of the language model.

    Args:
        config: the whole model's config.
        precision: its dtype.
    """
    short = shortened(config, period(config))
    with fake_parameters():
        model = AutoModelForImageTextToText.from_config(
            short, attn_implementation="eager", dtype=getattr(torch, precision)
        )
    return model.eval()


def trace_vision(config: Any, model: PreTrainedModel, precision: str) -> TracedGraph:
    """Traces all layers of a model's tower.

    Args:
        config: its config.
        model: the model, with fake parameters.
        precision: its dtype.
    """
    size = image_size(config)
    pixels = Port(PIXEL_VALUES, precision, (IMAGES, channels(config), *size))
    example = torch.zeros((2, channels(config), *size), dtype=getattr(torch, precision))
    with quiet_libraries(), torch.no_grad():
        program = torch.export.export(
            ImageFeatures(model), (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False
        )
        program_onnx = torch.onnx.export(program, optimize=False, opset_version=GROWING.opset, verbose=False)
    assert program_onnx is not None
    graph = program_onnx.model
    weights = weights_to_inputs(graph, model)
    with exact_constants():
        optimized(graph)
    shape = graph.graph.outputs[0].shape
    assert shape is not None
    tokens, hidden = (int(str(axis)) for axis in list(shape)[1:])
    features = Port(IMAGE_FEATURES, precision, (IMAGES, tokens, hidden))
    name_ports(graph, [pixels], [features])
    return TracedGraph(
        graph,
        weights,
        layers_of(model, int(config.vision_config.num_hidden_layers)),
        int(config.vision_config.num_hidden_layers),
        {},
        model.base_model_prefix,
        get_model_conversion_mapping(model),
        {},
        (),
        GraphSpec(precision=precision),
    )


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


def image_size(config: Any) -> tuple[int, int]:
    """Height and width of the images that a model takes, in pixels."""
    size = config.vision_config.image_size
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def channels(config: Any) -> int:
    """Number of color channels."""
    return int(getattr(config.vision_config, "num_channels", 3))
