"""The tower of Idefics3 and SmolVLM on whole tiles, whose patches have the same positions in every image."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmconv.export.vision.tower import VisionTower


class TileFeatures(nn.Module):
    """The model's features of tiles of one size without padding."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._positions = positions_of(model.model.vision_model.embeddings)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [tiles, tokens, hidden] of `pixel_values` [tiles, channels, height, width]."""
        tower = self.model.model.vision_model
        patches = tower.embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        embedded = patches + tower.embeddings.position_embedding(self._positions)
        encoded = tower.encoder(inputs_embeds=embedded, attention_mask=None).last_hidden_state
        features: Tensor = self.model.model.connector(tower.post_layernorm(encoded))
        return features


def positions_of(embeddings: Any) -> Tensor:
    """Positions of the patches of a tile without padding, as the model's own code counts them, int64 [1, patches].

    Args:
        embeddings: of the tower; its parameters are not used.
    """
    side, found = int(embeddings.num_patches_per_side), list[Tensor]()

    def record(positions: Tensor) -> Tensor:
        found.append(positions)
        return torch.zeros(1)

    without_weights = SimpleNamespace(
        **{name: value for name, value in vars(embeddings).items() if not name.startswith("_")},
        patch_embedding=lambda pixels: torch.zeros(1, 1, side, side),
        position_embedding=record,
    )
    size = side * int(embeddings.patch_size)
    pixels, mask = torch.zeros(1, 1, size, size), torch.ones(1, side, side, dtype=torch.bool)
    type(embeddings).forward(without_weights, pixel_values=pixels, patch_attention_mask=mask)
    return found[0]


IDEFICS3 = VisionTower(module=TileFeatures)
