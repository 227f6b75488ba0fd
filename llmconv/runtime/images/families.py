"""The families of models that take images: one row each, with the values that its vision graph is fed.

Mistral 3 (Pixtral) and Gemma 4 take images of any size, one run of the vision graph each; LLaVA-NeXT's kind (`anyres`)
divides an image into tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.errors import InputRefused, MalformedInput, first_line
from llmconv.runtime.extra_inputs import IMAGE_FEATURES, PIXEL_VALUES, embeds_in_layers
from llmconv.runtime.images.family import CONTRASTS, Features, Given, ImageFamily
from llmconv.runtime.images.qwen_vl import DeepstackedQwenImages, QwenImages, WindowedQwenImages
from llmconv.runtime.tokenizer import require_small_template
from llmconv.tensors import Array

IMAGE_SIZES = "image_sizes"


class PixtralImages(ImageFamily):
    """Images of any size; `pixel_values` are [images, channels, height, width], padded to the largest."""

    after_image = ""

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
        unit = unit_of(self.config)
        return [(height // unit) * (width // unit) for height, width in _sizes(given)]


def _sizes(given: Given) -> list[list[int]]:
    found: list[list[int]] = np.asarray(given[IMAGE_SIZES]).tolist()
    return found


def unit_of(config: Any) -> int:
    """Side in pixels of the square that becomes one feature."""
    return int(config.vision_config.patch_size) * int(config.spatial_merge_size)


NEWLINE, COUNTS = "newline", "batch_num_images"


class AnyresImages(ImageFamily):
    """Images of any size; `pixel_values` are [images, tiles, channels, height, width], padded with tiles of zeros."""

    def runs(self, given: Given) -> Iterator[Given]:
        """One run for each image; raises InputRefused for fewer tiles than an image of this size has.

        `given` has `pixel_values`, float [images, tiles, channels, height, width], and `image_sizes`, int [images, 2],
        height and width.
        """
        tiles = given[PIXEL_VALUES] if given[PIXEL_VALUES].ndim == 5 else given[PIXEL_VALUES][:, None]
        for pixels, (height, width) in zip(tiles, self._grids(given), strict=True):
            if len(pixels) < height * width + 1:
                raise InputRefused(
                    f"the processor makes {len(pixels)} tiles of an image, and the model takes {height * width + 1}",
                    hint="`image_grid_pinpoints` of the processor are not those in `config.json`",
                )
            yield {PIXEL_VALUES: pixels[: height * width + 1]}

    def rows(self, outputs: Sequence[Given], given: Given) -> Array:
        """Features, float [tokens, hidden], in the order of their placeholder tokens."""
        packed = [
            self.packed(one[IMAGE_FEATURES], one[NEWLINE][0], size, grid)
            for one, size, grid in zip(outputs, _sizes(given), self._grids(given), strict=True)
        ]
        return np.concatenate(packed)

    def packed(self, tiles: Array, newline: Array, size: Sequence[int], grid: tuple[int, int]) -> Array:
        """The features of one image, float [tokens, hidden]; transformers' `pack_image_features`.

        `tiles`, float [tiles, tokens, hidden], are those of its small copy and its tiles; `newline`, float [hidden],
        ends a row; `size` is (height, width); `grid` has the rows and columns of tiles, (0, 0) for the small copy
        alone.
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
        """Features [rows, columns, hidden], unpadded, shrunk to the model's limit; `side` is the rows of a tile."""
        return features

    def examples(self, shape: Sequence[int | str], random: np.random.Generator) -> list[Given]:
        """An image, two of different sizes, and others; see `ImageFamily.examples`."""
        size = [int(axis) for axis in shape[1:]]
        tile = size[1]
        odd = [[2 * tile - 1, tile + 3], [tile // 2, 3 * tile - 2], [3 * tile + 1, tile + 1]]
        sizes = [*odd, *(list(one) for one in self.config.image_grid_pinpoints[:4])]
        kinds = [sizes[:1], sizes[1:3], *(sizes[at : at + 1] for at in range(1, len(sizes)))]
        contrasts = [1.0, 1.0, *CONTRASTS * len(sizes)]
        return [self._example(of, size, contrast, random) for of, contrast in zip(kinds, contrasts, strict=False)]

    def _example(self, sizes: list[list[int]], tile: list[int], contrast: float, random: np.random.Generator) -> Given:
        given = {IMAGE_SIZES: np.array(sizes, np.int64)}
        tiles = max(height * width + 1 for height, width in self._grids(given))
        return {PIXEL_VALUES: random.standard_normal((len(sizes), tiles, *tile)) * contrast, **given}

    def features_of(self, given: Given, graph_tokens: int) -> list[int]:
        blank, newline = np.zeros((1, graph_tokens, 1)), np.zeros(1)
        return [
            len(self.packed(blank.repeat(grid[0] * grid[1] + 1, axis=0), newline, size, grid))
            for size, grid in zip(_sizes(given), self._grids(given), strict=True)
        ]

    def _grids(self, given: Given) -> list[tuple[int, int]]:
        """Rows and columns of tiles of each image."""
        tile = int(self.config.vision_config.image_size)
        found = [best_resolution(size, self.config.image_grid_pinpoints) for size in _sizes(given)]
        return [(height // tile, width // tile) for height, width in found]

    def _side(self, tokens: int) -> int:
        vision = self.config.vision_config
        side = int(vision.image_size) // int(vision.patch_size)
        if side**2 != tokens:
            problem = f"a tile has {tokens} features, and not {side} rows of {side}"
            raise InputRefused(problem, hint="correct `vision_feature_select_strategy` in `config.json`")
        return side


class OneVisionImages(AnyresImages):
    """Images of which each is tiles where the prompt has one image, and one tile where it has more; fewer features."""

    def shrunk(self, features: Array, side: int) -> Array:
        """Features [rows, columns, hidden], resized if they are of more than `anyres_max_N` tiles."""
        height, width = features.shape[:2]
        limit = str(self.config.vision_aspect_ratio)
        if not limit.removeprefix("anyres_max_").isdecimal():
            raise InputRefused(f"`vision_aspect_ratio` is `{limit}`, and not `anyres_max_N`", hint="see `config.json`")
        ratio = math.sqrt(height * width / (int(limit.removeprefix("anyres_max_")) * side**2))
        return resize_bilinear(features, int(height // ratio), int(width // ratio)) if ratio > 1.1 else features

    def _grids(self, given: Given) -> list[tuple[int, int]]:
        counts = given.get(COUNTS, np.ones(len(given[IMAGE_SIZES]), int)).tolist()
        alone = [count == 1 for count in counts for _ in range(count)]
        return [grid if one else (0, 0) for grid, one in zip(super()._grids(given), alone, strict=True)]

    def _example(self, sizes: list[list[int]], tile: list[int], contrast: float, random: np.random.Generator) -> Given:
        return {**super()._example(sizes, tile, contrast, random), COUNTS: np.array([len(sizes)], np.int64)}


def resize_bilinear(features: Array, height: int, width: int) -> Array:
    """Floats [rows, columns, hidden] to [height, width, hidden], 1 or more, without aligned corners or filter."""
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
    """The (height, width) of `grids` that keeps most of an image of `size`, then wastes least, as transformers."""

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


# column and row of each patch, int64 [images, patches, 2]; -1 for padding, which the graph does not take
PLACES = "image_position_ids"
GEMMA4_KINDS = "mm_token_type_ids"  # which tokens stand for features, 1 or 0, int64
GRIDS = ((2, 1), (1, 2), (2, 2), (3, 1))  # columns and rows of the features of random images


class Gemma4Images(ImageFamily):
    """Patches of images of any size, one feature for each square of patches."""

    after_image = ""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.read_whole = config.get_text_config().use_bidirectional_attention == "vision"
        self._side = int(config.vision_config.pooling_kernel_size)

    def load_processor(self, folder: Path) -> Any:
        """transformers' own, or the same for images alone: that of videos needs torchvision."""
        return super().load_processor(folder) if find_spec("torchvision") else PatchProcessor.of(folder)

    def with_images_by(self, processor: Any, images: Any) -> Any:
        if isinstance(processor, PatchProcessor):
            return replace(processor, images=images)
        return super().with_images_by(processor, images)

    def runs(self, given: Given) -> Iterator[Given]:
        """One image at a time, without padding, its patches sorted by squares."""
        for pixels, places in zip(given[PIXEL_VALUES], given[PLACES], strict=True):
            order = np.lexsort((*(places // self._side).T,))
            known = order[(places[order] != -1).all(axis=-1)]
            yield {PIXEL_VALUES: pixels[None, known], PLACES: places[None, known].astype(np.int64)}

    def rows(self, outputs: Sequence[Given], given: Given) -> Array:
        return np.concatenate([one[IMAGE_FEATURES][0] for one in outputs])

    def inputs(self, where: Array, features: Features, given: Given) -> dict[str, Array]:
        return {GEMMA4_KINDS: where.astype(np.int64)} if self.read_whole else {}

    def examples(self, shape: Sequence[int | str], random: np.random.Generator) -> list[Given]:
        """Images of several shapes with numbers from 0 to 1."""
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
        return [int(count) // self._side**2 for count in (given[PLACES] != -1).all(axis=-1).sum(axis=-1)]

    def model_inputs(self, where: Array, given: Given) -> dict[str, Array]:
        kinds = {GEMMA4_KINDS: where.astype(np.int64)} if self.read_whole else {}
        return {PIXEL_VALUES: given[PIXEL_VALUES], PLACES: given[PLACES], **kinds}


KINDS = "token_type_ids"  # which tokens stand for features, 1 or 0, int64


class Gemma3Images(ImageFamily):
    """Images of one size between two tokens that mark their start and end; the processor writes lines around them."""

    after_image = ""
    read_whole = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.start_token = config.boi_token_index

    def marker(self, processor: Any, placeholder: str) -> str:
        """The token before an image."""
        return str(processor.boi_token)

    def inputs(self, where: Array, features: Features, given: Given) -> dict[str, Array]:
        return {KINDS: where.astype(np.int64)}

    def model_inputs(self, where: Array, given: Given) -> dict[str, Array]:
        return {PIXEL_VALUES: given[PIXEL_VALUES], KINDS: where.astype(np.int64)}


MASK = "pixel_attention_mask"


class Idefics3Images(ImageFamily):
    """`pixel_values` are [prompts, tiles, channels, height, width]; tiles of zeros fill prompts with fewer tiles."""

    after_image = ""

    def runs(self, given: Given) -> Iterator[Given]:
        """One run for all tiles; raises InputRefused for a tile with padding, or no tile at all.

        `given` has `pixel_values`, float [prompts, tiles, channels, height, width], and `pixel_attention_mask`, int
        [prompts, tiles, height, width], 0 for padding.
        """
        kept = _kept(given)
        if not kept.any():
            raise InputRefused("the image is empty: all of its pixels are 0", hint="give another image")
        if MASK in given and not given[MASK][kept].all():
            hint = "`max_image_size` of the processor is not `image_size` of the vision tower"
            raise InputRefused("the processor pads a tile of an image, and `vision.onnx` takes whole tiles", hint=hint)
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


class Llama4Images(ImageFamily):
    """Tiles, which the processor lists for all images together."""

    tensors, after_image = "pt", ""

    def marker(self, processor: Any, placeholder: str) -> str:
        """The token of an image, which the processor replaces by tokens of patches."""
        return str(processor.image_token)


# by `model_type`; `export.vision.towers.VISION_TOWERS` has the same rows
IMAGE_FAMILIES: dict[str, type[ImageFamily]] = {
    "aya_vision": ImageFamily,
    "gemma3": Gemma3Images,
    "gemma4": Gemma4Images,
    "got_ocr2": ImageFamily,
    "idefics3": Idefics3Images,
    "internvl": ImageFamily,
    "llama4": Llama4Images,
    "llava": ImageFamily,
    "llava_next": AnyresImages,
    "llava_onevision": OneVisionImages,
    "mistral3": PixtralImages,
    "qwen2_5_vl": WindowedQwenImages,
    "qwen2_vl": QwenImages,
    "qwen3_vl": DeepstackedQwenImages,
    "qwen3_vl_moe": DeepstackedQwenImages,
    "smolvlm": Idefics3Images,
    "vipllava": ImageFamily,
}


def image_family(config: Any) -> ImageFamily | None:
    """The family of a model, from its whole transformers config; None if its images do not reach the graphs."""
    family = IMAGE_FAMILIES.get(config.model_type)
    takes_images = getattr(config, "vision_config", None) is not None and not embeds_in_layers(config)
    return family(config) if family and takes_images else None


def family_in(folder: Path) -> ImageFamily | None:
    """The `image_family` of the model in a folder; raises MalformedInput if transformers cannot read `config.json`."""
    from transformers import AutoConfig  # noqa: PLC0415 - only for models with a vision graph

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # an invalid config may raise anything
        problem = f"transformers cannot read the config in `{folder}`: {first_line(error)}"
        raise MalformedInput(problem, hint="copy `config.json` of the original model again") from error
    return image_family(config)


@dataclass(frozen=True)
class PatchProcessor:
    """Expands the placeholder of each image, as in transformers' processing_gemma4.py; `images` makes patches."""

    images: Any
    tokenizer: Any

    @classmethod
    def of(cls, folder: Path) -> PatchProcessor:
        from transformers import AutoTokenizer, Gemma4ImageProcessorPil  # noqa: PLC0415 - imports torch

        require_small_template(folder)
        images = Gemma4ImageProcessorPil.from_pretrained(folder, local_files_only=True)
        return cls(images, AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))

    def __call__(
        self, text: Sequence[str], images: Sequence[Sequence[Any]], return_tensors: str = "np", **options: Any
    ) -> dict[str, Array]:
        """Tokens, patches and their places of one text and its images (of Pillow).

        `return_tensors` is `np`; `options` are passed to the tokenizer. Raises ValueError unless the text has a
        placeholder for each image.
        """
        given = dict(self.images(list(images[0]), return_tensors="np"))
        counts, token = given.pop("num_soft_tokens_per_image"), self.tokenizer.image_token
        first, *others = text[0].split(token)
        if len(others) != len(counts):
            raise ValueError(f"{len(others)} placeholders and {len(counts)} images")
        start, end = self.tokenizer.boi_token, self.tokenizer.eoi_token
        parts = [f"{start}{token * int(count)}{end}{part}" for count, part in zip(counts, others, strict=True)]
        ids = self.tokenizer(first + "".join(parts), **options)["input_ids"]
        return {"input_ids": np.array([ids], dtype=np.int64), **given}
