"""VisionTower: how the vision tower of one family is traced; the default takes images of one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmconv.export.input_map import Port
from llmconv.export.vision.projected import projected
from llmconv.runtime.images.family import IMAGE_FEATURES, PIXEL_VALUES

IMAGES = "num_images"
"""The symbolic axis of graphs of images of one size."""


@dataclass(frozen=True)
class TowerInput:
    """One input of the graph, and its value in the trace, whose dynamic axes have sizes of 2 or more."""

    port: Port
    example: Tensor


class ImageFeatures(nn.Module):
    """The model's features of images of one size, up to the output of its projector."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [images, tokens, hidden] of `pixel_values` [images, channels, height, width]."""
        features = projected(self.model, {"pixel_values": pixel_values})
        return features.reshape(pixel_values.shape[0], -1, features.shape[-1])


def pixels_of_one_size(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """The input of a tower for images of the size in `vision_config`; `precision` is the dtype of the pixels."""
    size = config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    shape = (int(getattr(config.vision_config, "num_channels", 3)), int(height), int(width))
    example = torch.zeros((2, *shape), dtype=getattr(torch, precision))
    return (TowerInput(Port(PIXEL_VALUES, precision, (IMAGES, *shape)), example),)


@dataclass(frozen=True)
class VisionTower:
    """A family's tower.

    Attributes:
        alike: all of its layers are alike, so a few are traced and the others replicated.
        module: a module around the whole model, whose attribute must be named `model`; it takes tensors in the order of
            `inputs` and returns features, or a tuple of features and further outputs.
        inputs: returns those of the graph, given the whole model's config and the graph's precision.
        outputs: names of the graph's outputs, and the first axes of each: a symbol, a fixed size, or several symbols.
    """

    alike: bool = True
    module: Callable[[PreTrainedModel], nn.Module] = ImageFeatures
    inputs: Callable[[Any, str], Sequence[TowerInput]] = pixels_of_one_size
    outputs: tuple[tuple[str, str | int | tuple[str, ...]], ...] = ((IMAGE_FEATURES, IMAGES),)
