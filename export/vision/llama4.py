"""The tower of Llama 4 on tiles of one size; its rotary positions are complex numbers, here pairs of real ones."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from llmconv.export.complex_pairs import ComplexPair
from llmconv.export.library_patches import complex_as_pairs, replaced_attributes
from llmconv.export.vision.tower import VisionTower


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
