"""Gemma 4's vision tower: patches of images of any size, with their places, to one feature per square of patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmconv.export.input_map import Port
from llmconv.export.vision.tower import IMAGES, TowerInput, VisionTower
from llmconv.runtime.images.family import IMAGE_FEATURES, PIXEL_VALUES
from llmconv.runtime.images.gemma4 import PLACES

PATCHES, TOKENS = "num_patches", "num_tokens"


class Gemma4Features(nn.Module):
    """The model's features of images without padding, whose patches are sorted by the squares that become features.

    The encoder does not depend on the order of patches, so transformers' pooler, which looks for the patches of each
    square, is a mean over neighbors.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, image_position_ids: Tensor) -> Tensor:
        """Features [images, tokens, hidden].

        Args:
            pixel_values: [images, patches, numbers of a patch].
            image_position_ids: columns and rows of the patches, int64 [images, patches, 2].
        """
        tower, config = self.model.model.vision_tower, self.model.config.vision_config
        padding = torch.zeros(pixel_values.shape[:2], dtype=torch.bool)
        embedded = tower.patch_embedder(pixel_values, image_position_ids, padding)
        encoded = tower.encoder(embedded, None, pixel_position_ids=image_position_ids).last_hidden_state
        squares = encoded.float().unflatten(1, (-1, config.pooling_kernel_size**2))
        pooled = squares.mean(dim=2).to(encoded.dtype).float() * config.hidden_size**0.5
        if config.standardize:
            pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
        features: Tensor = self.model.model.embed_vision(pooled.to(embedded.dtype))
        return features


def patches_and_places(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """The inputs of the tower.

    Args:
        config: the whole model's config.
        precision: dtype of the pixels.
    """
    vision = config.vision_config
    size, side = 3 * vision.patch_size**2, vision.pooling_kernel_size
    pixels = torch.zeros((2, 2 * side**2, size), dtype=getattr(torch, precision))
    places = torch.cartesian_prod(torch.arange(2 * side), torch.arange(side))[None].repeat(2, 1, 1)
    return (
        TowerInput(Port(PIXEL_VALUES, precision, (IMAGES, PATCHES, size)), pixels),
        TowerInput(Port(PLACES, "int64", (IMAGES, PATCHES, 2)), places),
    )


GEMMA4 = VisionTower(module=Gemma4Features, inputs=patches_and_places, outputs=((IMAGE_FEATURES, (IMAGES, TOKENS)),))
