"""Images of Qwen2-VL and later: patches of any number of rows and columns, and positions on three axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmconv.errors import InputRefused, MalformedInput
from llmconv.runtime.extra_inputs import AXES, DEEPSTACK, DEEPSTACK_FEATURES, PIXEL_VALUES, POSITIONS
from llmconv.runtime.images.family import Features, Given, ImageFamily
from llmconv.tensors import Array

GRIDS, PATCH_POSITIONS, WINDOW_IDS = "image_grid_thw", "patch_positions", "window_ids"
# places in the table of position embeddings around each patch, and their weights
CELLS, CELL_WEIGHTS = "position_cells", "position_weights"
Patches = tuple[int, int]  # rows and columns of patches of an image

# rows and columns of features of the images of random prompts, and the size of their pixels
KINDS: tuple[tuple[tuple[Patches, ...], float], ...] = (
    (((2, 3),), 1.0),
    (((3, 2), (1, 4)), 1.0),
    (((5, 7),), 1.0),
    (((1, 1), (6, 2), (3, 3)), 0.1),
    (((4, 4),), 4.0),
)


class QwenImages(ImageFamily):
    """One run of the graph for each image, whose patches all attend to each other."""

    counts_positions = False

    @property
    def _merged(self) -> int:
        """Number of rows, and of columns, of patches that make a feature."""
        return int(self.config.vision_config.spatial_merge_size)

    def text_of_image(self, placeholder: str, processor: Any) -> str:
        """See `ImageFamily.text_of_image`; the tokens around an image keep two images apart."""
        names = ("vision_start_token_id", "vision_end_token_id")
        known = processor.tokenizer.convert_ids_to_tokens
        start, end = (known(getattr(self.config, name)) or "" for name in names)
        return f"{start}{placeholder}{end}"

    def runs(self, given: Given) -> Iterator[Given]:
        start = 0
        for patches in self._grids(given):
            stop = start + patches[0] * patches[1]
            yield {PIXEL_VALUES: given[PIXEL_VALUES][start:stop], **self._of_patches(patches)}
            start = stop

    def _of_patches(self, patches: Patches) -> dict[str, Array]:
        """The inputs of the graph that depend on the numbers of rows and columns alone."""
        return {PATCH_POSITIONS: self._in_order(np.moveaxis(np.indices(patches), 0, -1))}

    def _in_order(self, values: Array) -> Array:
        """Values of patches [rows, columns, …] in the order of the processor: those of one feature together."""
        rows, columns, *rest = values.shape
        merged = self._merged
        blocks = values.reshape(rows // merged, merged, columns // merged, merged, *rest)
        return np.ascontiguousarray(blocks.swapaxes(1, 2).reshape(rows * columns, *rest))

    def _grids(self, given: Given) -> list[Patches]:
        """Rows and columns of patches of each image; raises InputRefused for frames of a video, or other patches."""
        grids = [tuple(map(int, grid)) for grid in given[GRIDS]] if GRIDS in given else []
        if not grids or any(len(grid) != 3 or grid[0] != 1 for grid in grids):
            raise InputRefused("the model's processor makes no images but frames", hint="give images, and no video")
        whole = all(size % self._merged == 0 for grid in grids for size in grid[1:])
        if not whole or sum(rows * columns for _, rows, columns in grids) != len(given[PIXEL_VALUES]):
            problem = "the numbers of patches do not fit the sizes of the images"
            raise InputRefused(problem, hint="the processor's files are of another model than `config.json`")
        return [(rows, columns) for _, rows, columns in grids]

    def inputs(self, where: Array, features: Features, given: Given) -> dict[str, Array]:
        merged = self._merged
        return {
            POSITIONS: positions_on_axes(where, [(rows // merged, cols // merged) for rows, cols in self._grids(given)])
        }

    def examples(self, shape: Sequence[int | str], random: np.random.Generator) -> list[Given]:
        made: list[Given] = []
        for sizes, contrast in KINDS:
            grids = [(1, rows * self._merged, columns * self._merged) for rows, columns in sizes]
            values = random.standard_normal((sum(rows * columns for _, rows, columns in grids), int(shape[1])))
            made.append({PIXEL_VALUES: values * contrast, GRIDS: np.array(grids)})
        return made

    def features_of(self, given: Given, graph_tokens: int) -> list[int]:
        return [rows * columns // self._merged**2 for rows, columns in self._grids(given)]

    def model_inputs(self, where: Array, given: Given) -> dict[str, Array]:
        """See `ImageFamily.model_inputs`; the model computes positions from the kinds of tokens."""
        return {**given, "mm_token_type_ids": where.astype(np.int32)}


class WindowedQwenImages(QwenImages):
    """Most layers attend within windows."""

    def _of_patches(self, patches: Patches) -> dict[str, Array]:
        vision = self.config.vision_config
        side = vision.window_size // self._merged // vision.patch_size * self._merged
        rows, columns = (at // side for at in np.indices(patches))
        return {**super()._of_patches(patches), WINDOW_IDS: self._in_order(rows * (1 + patches[1] // side) + columns)}


class DeepstackedQwenImages(QwenImages):
    """Position embeddings are resampled to the size of the image, and the decoder's first layers get features, too."""

    def _of_patches(self, patches: Patches) -> dict[str, Array]:
        side = math.isqrt(self.config.vision_config.num_position_embeddings)
        rows, columns = (_taps(size, side) for size in patches)
        cells = rows[0][:, None, :, None] * side + columns[0][None, :, None, :]
        weights = rows[1][:, None, :, None] * columns[1][None, :, None, :]
        resampled = {CELLS: cells.reshape(*patches, -1), CELL_WEIGHTS: weights.reshape(*patches, -1)}
        return {**super()._of_patches(patches), **{name: self._in_order(array) for name, array in resampled.items()}}

    def rows(self, outputs: Sequence[Given], given: Given) -> Array:
        """As `ImageFamily.rows`; raises MalformedInput if the graph has no features for the first layers."""
        if any(DEEPSTACK_FEATURES not in one for one in outputs):
            problem = f"the vision graph has no output `{DEEPSTACK_FEATURES}`"
            raise MalformedInput(problem, hint="run `llmconv export` again")
        return super().rows(outputs, given)

    def inputs(self, where: Array, features: Features, given: Given) -> dict[str, Array]:
        deep = np.concatenate([one[DEEPSTACK_FEATURES] for one in features.outputs]).astype(np.float32)
        added = np.zeros((len(where), deep.shape[1]), dtype=np.float32)
        added[where] = deep
        return {**super().inputs(where, features, given), DEEPSTACK.name: added}


def _taps(size: int, side: int) -> tuple[Array, Array]:
    """The two nearest places in a table of `side` places for each of `size` patches, and their weights.

    Source: `get_vision_interpolation_indices_and_weights` in transformers, bilinear with aligned corners.
    """
    at = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    near = np.floor(at)[:, None] + np.arange(2)
    weights = np.maximum(1 - np.abs(at[:, None] - near), 0).astype(np.float32)
    return np.clip(near, 0, side - 1).astype(np.int64), weights


Grid = tuple[int, int]  # rows and columns of the features of an image


def positions_on_axes(where: Array, grids: Sequence[Grid]) -> Array:
    """Positions of the tokens of a prompt, int64 [3, tokens]; `where`, bool [tokens], marks placeholders of features.

    The features of an image have one position in time, and each its row and column from there. The text after it counts
    on from the larger of its numbers of rows and columns. Source: `get_rope_index` in transformers. Raises InputRefused
    unless the placeholders are one run for each image, with a token of text between two runs.
    """
    edges = np.diff(np.concatenate([[0], where.astype(np.int8), [0]]))
    starts, stops = ([int(at) for at in np.flatnonzero(edges == step)] for step in (1, -1))
    if [stop - start for start, stop in zip(starts, stops, strict=True)] != [rows * columns for rows, columns in grids]:
        problem = "the placeholders of images in the prompt are not one run for each image"
        raise InputRefused(problem, hint="write a token between two images, as the model's chat template does")
    parts, at, done = [], 0, 0
    for start, stop, grid in zip(starts, stops, grids, strict=True):
        text = start - done
        parts += [_counted(at, text), at + text + np.indices((1, *grid)).reshape(AXES, -1)]
        at, done = at + text + max(grid), stop
    return np.concatenate([*parts, _counted(at, len(where) - done)], axis=1)


def _counted(start: int, count: int) -> Array:
    return np.repeat(np.arange(start, start + count, dtype=np.int64)[None], AXES, axis=0)
