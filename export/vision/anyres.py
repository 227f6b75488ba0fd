"""The tower of LLaVA-NeXT and LLaVA-OneVision: tiles of one size, and the vector that ends each row of an image."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from llmconv.export.vision.tower import PROJECTOR


class _Found(Exception):
    """Leaves the model's code after its projector."""


class _Captured:
    """Stands for the projector's output in the code after it, which would split the tiles by image."""

    def split(self, *sizes: Any) -> None:
        """Instead of `torch.split`."""
        raise _Found


class AnyresFeatures(nn.Module):
    """The model's features of tiles, before it packs those of an image, and `image_newline`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Features [tiles, tokens, hidden] of `pixel_values` [tiles, channels, height, width], and [1, hidden]."""

        found: list[Tensor] = []

        def capture(module: nn.Module, given: Any, output: Tensor) -> _Captured:
            found.append(output)
            return _Captured()

        whole = self.model.model
        hook = whole.get_submodule(PROJECTOR).register_forward_hook(capture)
        try:
            with suppress(_Found):
                whole.get_image_features(pixel_values=pixel_values, image_sizes=[])
        finally:
            hook.remove()
        return found[0], whole.image_newline[None]
