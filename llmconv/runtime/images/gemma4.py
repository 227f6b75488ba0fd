"""Gemma 4: images of any size, as patches with their places; in large models tokens of an image see each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.runtime.images.family import CONTRASTS, IMAGE_FEATURES, PIXEL_VALUES, Features, Given, ImageFamily
from llmconv.tensors import Array

PLACES = "image_position_ids"
"""Column and row of each patch, int64 [images, patches, 2]; -1 for padding, which the graph does not take."""

KINDS = "mm_token_type_ids"
"""Which tokens stand for features, 1 or 0, int64."""

GRIDS = ((2, 1), (1, 2), (2, 2), (3, 1))
"""Columns and rows of the features of random images."""


class Gemma4Images(ImageFamily):
    """Patches of images of any size, one feature for each square of patches."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.read_whole = config.get_text_config().use_bidirectional_attention == "vision"
        self._side = int(config.vision_config.pooling_kernel_size)

    def load_processor(self, folder: Path) -> Any:
        """transformers' own, or the same for images alone: that of videos needs torchvision."""
        if find_spec("torchvision"):
            return super().load_processor(folder)
        from llmconv.runtime.images.gemma4_processor import PatchProcessor  # noqa: PLC0415 - imports transformers

        return PatchProcessor.of(folder)

    def with_images_by(self, processor: Any, images: Any) -> Any:
        """Ours has it under another name, see `ImageFamily.with_images_by`."""
        from llmconv.runtime.images.gemma4_processor import PatchProcessor  # noqa: PLC0415 - imports transformers

        if isinstance(processor, PatchProcessor):
            return replace(processor, images=images)
        return super().with_images_by(processor, images)

    def text_of_image(self, placeholder: str, processor: Any) -> str:
        """The placeholder alone, see `ImageFamily.text_of_image`."""
        return placeholder

    def runs(self, given: Given) -> Iterator[Given]:
        """One image at a time, without padding, its patches sorted by squares, see `ImageFamily.runs`."""
        for pixels, places in zip(given[PIXEL_VALUES], given[PLACES], strict=True):
            order = np.lexsort((*(places // self._side).T,))
            known = order[(places[order] != -1).all(axis=-1)]
            yield {PIXEL_VALUES: pixels[None, known], PLACES: places[None, known].astype(np.int64)}

    def rows(self, outputs: Sequence[Given], given: Given) -> Array:
        """The features of all images, see `ImageFamily.rows`."""
        return np.concatenate([one[IMAGE_FEATURES][0] for one in outputs])

    def inputs(self, where: Array, features: Features, given: Given) -> dict[str, Array]:
        """Which tokens belong to images, see `ImageFamily.inputs`."""
        return {KINDS: where.astype(np.int64)} if self.read_whole else {}

    def examples(self, shape: Sequence[int | str], random: np.random.Generator) -> list[Given]:
        """Images of several shapes with numbers from 0 to 1, see `ImageFamily.examples`."""
        grids = [GRIDS[:1], GRIDS[1:3], *(GRIDS[:count] for _ in CONTRASTS for count in (1, 3)), GRIDS[3:]]
        contrasts = [1.0, 1.0, *(contrast for contrast in CONTRASTS for _ in range(2)), 1.0]
        most = max(columns * rows for columns, rows in GRIDS) * self._side**2
        return [
            {
                PIXEL_VALUES: 0.5 + random.uniform(-0.5, 0.5, (len(one), most, int(shape[-1]))) * contrast,
                PLACES: np.stack([self._places(*grid, most) for grid in one]),
            }
            for one, contrast in zip(grids, contrasts, strict=True)
        ]

    def _places(self, columns: int, rows: int, most: int) -> Array:
        """The places of all patches of an image, and padding."""
        across, down = np.meshgrid(np.arange(columns * self._side), np.arange(rows * self._side))
        places = np.stack([across, down], axis=-1).reshape(-1, 2)
        return np.pad(places, ((0, most - len(places)), (0, 0)), constant_values=-1)

    def features_of(self, given: Given, graph_tokens: int) -> list[int]:
        """Number of features of each image, see `ImageFamily.features_of`."""
        return [int(count) // self._side**2 for count in (given[PLACES] != -1).all(axis=-1).sum(axis=-1)]

    def model_inputs(self, where: Array, given: Given) -> dict[str, Array]:
        """Patches, places and kinds of tokens, see `ImageFamily.model_inputs`."""
        kinds = {KINDS: where.astype(np.int64)} if self.read_whole else {}
        return {PIXEL_VALUES: given[PIXEL_VALUES], PLACES: given[PLACES], **kinds}
