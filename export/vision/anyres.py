"""The tower of LLaVA-NeXT and LLaVA-OneVision: tiles of one size, and the vector that ends each row of an image."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from llmconv.export.vision.projected import projected
from llmconv.export.vision.tower import IMAGES, VisionTower
from llmconv.runtime.images.anyres import NEWLINE
from llmconv.runtime.images.family import IMAGE_FEATURES


class AnyresFeatures(nn.Module):
    """The model's features of tiles, before it packs those of an image, and `image_newline`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Features [tiles, tokens, hidden] of `pixel_values` [tiles, channels, height, width], and [1, hidden]."""
        features = projected(self.model, {"pixel_values": pixel_values, "image_sizes": []})
        return features, self.model.model.image_newline[None]


ANYRES = VisionTower(module=AnyresFeatures, outputs=((IMAGE_FEATURES, IMAGES), (NEWLINE, 1)))
