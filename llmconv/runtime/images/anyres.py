"""LLaVA-NeXT and LLaVA-OneVision: an image is a small copy of itself and tiles, whose features are packed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from llmconv.errors import InputRefused
from llmconv.runtime.images.family import CONTRASTS, IMAGE_FEATURES, PIXEL_VALUES, Given, ImageFamily
from llmconv.tensors import Array

IMAGE_SIZES, NEWLINE, COUNTS = "image_sizes", "newline", "batch_num_images"


class AnyresImages(ImageFamily):
    """Images of any size; `pixel_values` are [images, tiles, channels, height, width], padded with tiles of zeros."""

    def runs(self, given: Given) -> Iterator[Given]:
        """One run for each image; raises InputRefused for fewer tiles than an image of this size has.

        `given` has `pixel_values`, float [images, tiles, channels, height, width], and `image_sizes`, int [images, 2],
        height and width.
        """
        for pixels, (height, width) in zip(self._tiles(given), self._grids(given), strict=True):
            if len(pixels) < height * width + 1:
                raise InputRefused(
                    f"the processor makes {len(pixels)} tiles of an image, and the model takes {height * width + 1}",
                    hint="`image_grid_pinpoints` of the processor are not those in `config.json`",
                )
            yield {PIXEL_VALUES: pixels[: height * width + 1]}

    def rows(self, outputs: Sequence[Given], given: Given) -> Array:
        """Features, float [tokens, hidden], in the order of their placeholder tokens."""
        sizes = np.asarray(given[IMAGE_SIZES]).tolist()
        packed = [
            self.packed(one[IMAGE_FEATURES], one[NEWLINE][0], size, grid)
            for one, size, grid in zip(outputs, sizes, self._grids(given), strict=True)
        ]
        return np.concatenate(packed)

    def packed(self, tiles: Array, newline: Array, size: Sequence[int], grid: tuple[int, int]) -> Array:
        """The features of one image, float [tokens, hidden]; transformers' `pack_image_features`.

        Args:
            tiles: features of the small copy of the image and of its tiles, float [tiles, tokens, hidden].
            newline: what ends a row, float [hidden].
            size: of the image, height and width.
            grid: rows and columns of tiles; (0, 0) for the small copy alone.
        """
        if not any(grid):
            return np.concatenate([tiles[0], newline[None]])
        side = self._side(tiles.shape[1])
        whole = tiles[1:].reshape(*grid, side, side, -1).transpose(0, 2, 1, 3, 4)
        whole = whole.reshape(grid[0] * side, grid[1] * side, -1)
        whole = self.shrunk(whole[unpadded(whole.shape[:2], size)], side)
        ends = np.broadcast_to(newline, (len(whole), 1, len(newline)))
        return np.concatenate([tiles[0], np.concatenate([whole, ends], axis=1).reshape(-1, len(newline))])

    def shrunk(self, features: Array, side: int) -> Array:
        """Features [rows, columns, hidden] of an image without padding, resized if the model limits their number.

        `side` is the number of rows of a tile.
        """
        return features

    def examples(self, shape: Sequence[int | str], random: np.random.Generator) -> list[Given]:
        """An image, two of different sizes, and others; see `ImageFamily.examples`."""
        size = [int(axis) for axis in shape[1:]]
        sizes = self._example_sizes(size[1])
        kinds = [sizes[:1], sizes[1:3], *(sizes[at : at + 1] for at in range(1, len(sizes)))]
        contrasts = [1.0, 1.0, *CONTRASTS * len(sizes)]
        return [self._example(of, size, contrast, random) for of, contrast in zip(kinds, contrasts, strict=False)]

    def _example(self, sizes: list[list[int]], tile: list[int], contrast: float, random: np.random.Generator) -> Given:
        given = {IMAGE_SIZES: np.array(sizes, np.int64)}
        tiles = max(height * width + 1 for height, width in self._grids(given))
        return {PIXEL_VALUES: random.standard_normal((len(sizes), tiles, *tile)) * contrast, **given}

    def _example_sizes(self, tile: int) -> list[list[int]]:
        """Heights and widths: two that fill a grid in part, each way, then those of all grids in the config."""
        odd = [[2 * tile - 1, tile + 3], [tile // 2, 3 * tile - 2], [3 * tile + 1, tile + 1]]
        return [*odd, *(list(one) for one in self.config.image_grid_pinpoints[:4])]

    def features_of(self, given: Given, graph_tokens: int) -> list[int]:
        """Number of features of each image."""
        blank, newline = np.zeros((1, graph_tokens, 1)), np.zeros(1)
        return [
            len(self.packed(blank.repeat(grid[0] * grid[1] + 1, axis=0), newline, size, grid))
            for size, grid in zip(np.asarray(given[IMAGE_SIZES]).tolist(), self._grids(given), strict=True)
        ]

    def _tiles(self, given: Given) -> Array:
        pixels = given[PIXEL_VALUES]
        return pixels if pixels.ndim == 5 else pixels[:, None]

    def _grids(self, given: Given) -> list[tuple[int, int]]:
        """Rows and columns of tiles of each image."""
        tile = int(self.config.vision_config.image_size)
        found = [best_resolution(size, self.config.image_grid_pinpoints) for size in given[IMAGE_SIZES].tolist()]
        return [(height // tile, width // tile) for height, width in found]

    def _side(self, tokens: int) -> int:
        vision = self.config.vision_config
        side = int(vision.image_size) // int(vision.patch_size)
        if side**2 != tokens:
            raise InputRefused(
                f"a tile has {tokens} features, and not {side} rows of {side}",
                hint="correct `vision_feature_select_strategy` in `config.json`",
            )
        return side


class OneVisionImages(AnyresImages):
    """Images of which each is tiles where the prompt has one image, and one tile where it has more; fewer features."""

    def shrunk(self, features: Array, side: int) -> Array:
        """Features [rows, columns, hidden], resized if they are of more than `anyres_max_N` tiles."""
        height, width = features.shape[:2]
        ratio = math.sqrt(height * width / (self._most_tiles() * side**2))
        return resize_bilinear(features, int(height // ratio), int(width // ratio)) if ratio > 1.1 else features

    def _most_tiles(self) -> int:
        limit = str(self.config.vision_aspect_ratio)
        if not limit.removeprefix("anyres_max_").isdecimal():
            raise InputRefused(f"`vision_aspect_ratio` is `{limit}`, and not `anyres_max_N`", hint="see `config.json`")
        return int(limit.removeprefix("anyres_max_"))

    def _grids(self, given: Given) -> list[tuple[int, int]]:
        counts = given.get(COUNTS, np.ones(len(given[IMAGE_SIZES]), int)).tolist()
        alone = [count == 1 for count in counts for _ in range(count)]
        return [grid if one else (0, 0) for grid, one in zip(super()._grids(given), alone, strict=True)]

    def _example(self, sizes: list[list[int]], tile: list[int], contrast: float, random: np.random.Generator) -> Given:
        given = super()._example(sizes, tile, contrast, random)
        return {**given, COUNTS: np.array([len(sizes)], np.int64)}


def resize_bilinear(features: Array, height: int, width: int) -> Array:
    """Features [rows, columns, hidden] resized without aligned corners and without a filter to [height, width, hidden].

    All float; `height` and `width` are 1 or more.
    """
    return _resized(_resized(features, 0, height), 1, width).astype(features.dtype)


def _resized(features: Array, axis: int, size: int) -> Array:
    """One axis resized: each point is between two, whose weights are the distances."""
    old = features.shape[axis]
    points = np.maximum((np.arange(size) + 0.5) * (old / size) - 0.5, 0)
    first = np.minimum(points.astype(int), old - 1)
    second = np.minimum(first + 1, old - 1)
    shape = [1] * features.ndim
    shape[axis] = size
    weight = (points - first).reshape(shape)
    found: Array = features.take(first, axis) * (1 - weight) + features.take(second, axis) * weight
    return found


def best_resolution(size: Sequence[int], grids: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The (height, width) of `grids` that keeps most of an image, then wastes least; transformers' function.

    `size` is the height and width of the image.
    """

    def merit(grid: Sequence[int]) -> tuple[int, int]:
        scale = min(grid[1] / size[1], grid[0] / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return kept, kept - grid[0] * grid[1]

    height, width = max(grids, key=merit)
    return int(height), int(width)


def unpadded(grid: Sequence[int], size: Sequence[int]) -> tuple[slice, slice]:
    """The rows and columns of a grid that an image of `size` (height, width) fills; transformers' `unpad_image`."""
    (rows, columns), (height, width) = grid, size
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(padding, rows - padding), slice(None)
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(None), slice(padding, columns - padding)
