"""The tower of Mistral 3 (Pixtral) for one image of any size, whose patches attend to each other."""

from __future__ import annotations

from dataclasses import dataclass
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

TOKENS, ROWS, COLUMNS = "image_tokens", "rows", "columns"


@dataclass(frozen=True)
class _Pixels:
    """A size in pixels, which the model's code divides by that of a patch; the graph need not."""

    patches: Any

    def __floordiv__(self, patch: int) -> Any:
        return self.patches


class PixtralFeatures(nn.Module):
    """The model's features of one image."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [rows * columns, hidden] of `pixel_values` [1, channels, rows, unit, columns, unit]."""
        _, channels, rows, unit, columns, _ = pixel_values.shape
        pixels = pixel_values.reshape(1, channels, rows * unit, columns * unit)
        merge = self.model.config.spatial_merge_size
        size = _Pixels(rows * merge), _Pixels(columns * merge)

        def merged(grid: Tensor, kernel_size: int, stride: int) -> Tensor:
            """`unfold` of squares that fill the grid."""
            squares = grid.reshape(1, -1, rows, kernel_size, columns, kernel_size)
            return squares.permute(0, 1, 3, 5, 2, 4).flatten(1, 3).flatten(2)

        attention = replaced_attributes(modeling_pixtral, {"generate_block_attention_mask": _no_mask})
        with attention, replaced_attributes(nn.functional, {"unfold": merged}):
            return projected(self.model, {"pixel_values": pixels, "image_sizes": [size]})


def _no_mask(*given: Any) -> None:
    """Instead of the mask between images: there is one."""


def squares_of_one_image(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """The input of the tower, with any number of rows and columns; `precision` is the dtype of the pixels."""
    unit, channels = unit_of(config), int(config.vision_config.num_channels)
    example = torch.zeros((1, channels, 3, unit, 5, unit), dtype=getattr(torch, precision))
    return (TowerInput(Port(PIXEL_VALUES, precision, (1, channels, ROWS, unit, COLUMNS, unit)), example),)


PIXTRAL = VisionTower(module=PixtralFeatures, inputs=squares_of_one_image, outputs=((IMAGE_FEATURES, TOKENS),))
