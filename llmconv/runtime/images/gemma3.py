"""Gemma 3: the tokens of an image attend to each other in both directions."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmconv.runtime.images.family import PIXEL_VALUES, Features, Given, ImageFamily
from llmconv.tensors import Array

KINDS = "token_type_ids"
"""Which tokens stand for features, 1 or 0, int64."""


class Gemma3Images(ImageFamily):
    """Images of one size between two tokens that mark their start and end.

    Args:
        config: the whole model's transformers config.
    """

    read_whole = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.start_token = config.boi_token_index

    def text_of_image(self, placeholder: str, processor: Any) -> str:
        """The marker alone: the processor writes empty lines around it; see `ImageFamily.text_of_image`."""
        return placeholder

    def marker(self, processor: Any, placeholder: str) -> str:
        """The token before an image, see `ImageFamily.marker`."""
        return str(processor.boi_token)

    def inputs(self, where: Array, features: Features, given: Given) -> dict[str, Array]:
        """Which tokens belong to images, see `ImageFamily.inputs`."""
        return {KINDS: where.astype(np.int64)}

    def model_inputs(self, where: Array, given: Given) -> dict[str, Array]:
        """Pixels and the same for a batch, see `ImageFamily.model_inputs`."""
        return {PIXEL_VALUES: given[PIXEL_VALUES], KINDS: where.astype(np.int64)}
