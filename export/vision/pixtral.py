"""The tower of Mistral 3 (Pixtral) for one image of any size, whose patches attend to each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.pixtral import modeling_pixtral

from llmconv.export.input_map import Port
from llmconv.export.library_patches import replaced_attributes
from llmconv.export.vision.projected import projected
from llmconv.export.vision.tower import TowerInput, VisionTower
from llmconv.runtime.images.family import IMAGE_FEATURES, PIXEL_VALUES
from llmconv.runtime.images.pixtral import unit_of

TOKENS, HEIGHT, WIDTH = "image_tokens", "height", "width"


class PixtralFeatures(nn.Module):
    """The model's features of one image."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [tokens, hidden] of `pixel_values` [1, channels, height, width], multiples of merged patches."""
        unit = unit_of(self.model.config)
        height, width = (size // unit * unit for size in pixel_values.shape[2:])
        pixels = pixel_values[:, :, :height, :width]  # nothing is cut off; it tells the trace the multiples
        with replaced_attributes(modeling_pixtral, {"generate_block_attention_mask": _no_mask}):
            return projected(self.model, {"pixel_values": pixels, "image_sizes": [(height, width)]})


def _no_mask(*given: Any) -> None:
    """Instead of the mask between images: there is one."""


def pixels_of_one_image(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """The input of the tower, of any height and width.

    Args:
        config: the whole model's config.
        precision: dtype of the pixels.
    """
    unit, channels = unit_of(config), int(config.vision_config.num_channels)
    example = torch.zeros((1, channels, 3 * unit, 5 * unit), dtype=getattr(torch, precision))
    return (TowerInput(Port(PIXEL_VALUES, precision, (1, channels, HEIGHT, WIDTH)), example),)


PIXTRAL = VisionTower(module=PixtralFeatures, inputs=pixels_of_one_image, outputs=((IMAGE_FEATURES, TOKENS),))
