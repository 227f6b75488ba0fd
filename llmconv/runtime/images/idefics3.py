"""Idefics3 and SmolVLM: the tiles of an image, all of one size, with equally many features each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmconv.errors import InputRefused
from llmconv.runtime.images.family import CONTRASTS, PIXEL_VALUES, Given, ImageFamily
from llmconv.tensors import Array

MASK = "pixel_attention_mask"


class Idefics3Images(ImageFamily):
    """`pixel_values` are [prompts, tiles, channels, height, width]; tiles of zeros fill prompts with fewer tiles."""

    def text_of_image(self, placeholder: str, processor: Any) -> str:
        """The placeholder alone, as in the chat templates of these models."""
        return placeholder

    def runs(self, given: Given) -> Iterator[Given]:
        """One run for all tiles.

        Args:
            given: `pixel_values`, float [prompts, tiles, channels, height, width], and `pixel_attention_mask`, int
                [prompts, tiles, height, width], 0 for padding.

        Raises:
            InputRefused: a tile with padding, or no tile at all.
        """
        kept = _kept(given)
        if not kept.any():
            raise InputRefused("the image is empty: all of its pixels are 0", hint="give another image")
        if MASK in given and not given[MASK][kept].all():
            raise InputRefused(
                "the processor pads a tile of an image, and `vision.onnx` takes whole tiles",
                hint="`max_image_size` of the processor is not `image_size` of the vision tower",
            )
        yield {PIXEL_VALUES: given[PIXEL_VALUES][kept]}

    def examples(self, shape: Sequence[int | str], random: np.random.Generator) -> list[Given]:
        """One tile, two, three of which one is padding, and others; see `ImageFamily.examples`."""
        size = [int(axis) for axis in shape[1:]]
        kinds = [(1, 1.0), (2, 1.0), (3, 1.0), *((count, contrast) for contrast in CONTRASTS for count in (1, 3))]
        made = [random.standard_normal((1, count, *size)) * contrast for count, contrast in kinds]
        made[2][:, -1] = 0
        return [{PIXEL_VALUES: pixels, MASK: np.ones((*pixels.shape[:2], *size[1:]), np.int64)} for pixels in made]

    def features_of(self, given: Given, graph_tokens: int) -> list[int]:
        """Number of features of each tile that is not padding."""
        return [graph_tokens] * int(_kept(given).sum())


def _kept(given: Given) -> Array:
    """Which tiles are not padding, bool [prompts, tiles], as transformers decides it."""
    return np.asarray(given[PIXEL_VALUES].any(axis=(-3, -2, -1)))
