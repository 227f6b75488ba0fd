"""Llama 4: the tiles of all images, of one size, with equally many features each."""

from __future__ import annotations

from typing import Any

from llmconv.runtime.images.family import ImageFamily


class Llama4Images(ImageFamily):
    """Tiles, which the processor lists for all images together."""

    tensors = "pt"

    def text_of_image(self, placeholder: str, processor: Any) -> str:
        """The placeholder alone, as in the chat template of these models."""
        return placeholder

    def marker(self, processor: Any, placeholder: str) -> str:
        """The token of an image, which the processor replaces by tokens of patches."""
        return str(processor.image_token)
