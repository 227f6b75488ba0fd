"""Mistral 3 (Pixtral): images of any size, one run of the vision graph each, and a feature for each merged patch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmconv.errors import InputRefused
from llmconv.runtime.images.family import CONTRASTS, PIXEL_VALUES, Given, ImageFamily
from llmconv.tensors import Array

IMAGE_SIZES = "image_sizes"


class PixtralImages(ImageFamily):
    """Images of any size; `pixel_values` are [images, channels, height, width], padded to the largest."""

    def text_of_image(self, placeholder: str, processor: Any) -> str:
        """The placeholder alone, as in the chat templates of these models."""
        return placeholder

    def runs(self, given: Given) -> Iterator[Given]:
        """One run for each image, without its padding, cut into squares: [1, channels, rows, unit, columns, unit].

        `given` has `pixel_values`, float [images, channels, height, width], and `image_sizes`, int [images, 2], height
        and width. Raises InputRefused for a size that is not a multiple of the model's merged patches.
        """
        unit = unit_of(self.config)
        for pixels, (height, width) in zip(given[PIXEL_VALUES], _sizes(given), strict=True):
            if height % unit or width % unit:
                raise InputRefused(
                    f"the processor makes images of {height} × {width} pixels, and the model takes multiples of {unit}",
                    hint="`patch_size` and `spatial_merge_size` of the processor are not those in `config.json`",
                )
            squares = (1, len(pixels), height // unit, unit, width // unit, unit)
            yield {PIXEL_VALUES: pixels[:, :height, :width].reshape(squares)}

    def examples(self, shape: Sequence[int | str], random: np.random.Generator) -> list[Given]:
        """An image, two of different sizes, and others; see `ImageFamily.examples`."""
        drawn = [([[2, 3]], 1.0), ([[3, 1], [2, 4]], 1.0)]
        drawn += [(units, contrast) for contrast in CONTRASTS for units in ([[1, 2]], [[1, 5], [4, 2], [3, 3]])]
        return [self._example(np.array(units), int(shape[1]), contrast, random) for units, contrast in drawn]

    def _example(self, units: Array, channels: int, contrast: float, random: np.random.Generator) -> Given:
        sizes = units.astype(np.int64) * unit_of(self.config)
        pixels = random.standard_normal((len(sizes), channels, *sizes.max(axis=0))) * contrast
        return {PIXEL_VALUES: pixels, IMAGE_SIZES: sizes}

    def features_of(self, given: Given, graph_tokens: int) -> list[int]:
        """Number of features of each image."""
        unit = unit_of(self.config)
        return [(height // unit) * (width // unit) for height, width in _sizes(given)]


def _sizes(given: Given) -> list[list[int]]:
    found: list[list[int]] = np.asarray(given[IMAGE_SIZES]).tolist()
    return found


def unit_of(config: Any) -> int:
    """Side in pixels of the square that becomes one feature."""
    return int(config.vision_config.patch_size) * int(config.spatial_merge_size)
