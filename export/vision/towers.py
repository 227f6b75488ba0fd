"""The table of vision towers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmconv.export.complex_pairs import ComplexPair
from llmconv.export.input_map import Port
from llmconv.export.library_patches import complex_as_pairs, replaced_attributes
from llmconv.export.vision.pixtral import PIXTRAL
from llmconv.export.vision.projected import projected
from llmconv.export.vision.qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from llmconv.export.vision.tower import IMAGES, TowerInput, VisionTower
from llmconv.runtime.images.anyres import NEWLINE
from llmconv.runtime.images.family import IMAGE_FEATURES, PIXEL_VALUES
from llmconv.runtime.images.gemma4 import PLACES


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
    """Positions int64 [1, patches] of a tile without padding, as the model's code counts them; reads no parameters."""
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


class Llama4Features(nn.Module):
    """The model's features of tiles, up to the output of its projector."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        found = model.vision_model.rotary_embedding.freqs_ci
        self._rotations = ComplexPair(found.real.clone(), found.imag.clone())

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [tiles, tokens, hidden] of `pixel_values` [tiles, channels, height, width]."""
        rotary = self.model.vision_model.rotary_embedding
        with complex_as_pairs(), replaced_attributes(rotary, {"forward": lambda pixels: self._rotations}):
            encoded = self.model.vision_model(pixel_values, return_dict=True).last_hidden_state
        features: Tensor = self.model.multi_modal_projector(encoded)
        return features


LLAMA4 = VisionTower(module=Llama4Features)


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
        """Features [images, tokens, hidden] of pixels [images, patches, numbers of a patch].

        `image_position_ids` are columns and rows of the patches, int64 [images, patches, 2].
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
    """The inputs of the tower; `precision` is the dtype of the pixels."""
    vision = config.vision_config
    size, side = 3 * vision.patch_size**2, vision.pooling_kernel_size
    pixels = torch.zeros((2, 2 * side**2, size), dtype=getattr(torch, precision))
    places = torch.cartesian_prod(torch.arange(2 * side), torch.arange(side))[None].repeat(2, 1, 1)
    return (
        TowerInput(Port(PIXEL_VALUES, precision, (IMAGES, PATCHES, size)), pixels),
        TowerInput(Port(PLACES, "int64", (IMAGES, PATCHES, 2)), places),
    )


GEMMA4 = VisionTower(module=Gemma4Features, inputs=patches_and_places, outputs=((IMAGE_FEATURES, (IMAGES, TOKENS)),))


VISION_TOWERS: dict[str, VisionTower] = {
    "aya_vision": VisionTower(),
    "gemma3": VisionTower(),
    "gemma4": GEMMA4,
    "got_ocr2": VisionTower(alike=False),  # layers with windows between layers without
    "idefics3": IDEFICS3,
    "internvl": VisionTower(),
    "llama4": LLAMA4,
    "llava": VisionTower(),
    "llava_next": ANYRES,
    "llava_onevision": ANYRES,
    "mistral3": PIXTRAL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_vl": QWEN2_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "smolvlm": IDEFICS3,
    "vipllava": VisionTower(),
}
"""By `model_type`; `runtime.images.families.IMAGE_FAMILIES` has the same rows."""
