"""The table of families of multimodal models whose images reach the graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.errors import InputRefused, MalformedInput, first_line
from llmconv.runtime.images.anyres import AnyresImages, OneVisionImages
from llmconv.runtime.images.family import CONTRASTS, PIXEL_VALUES, Features, Given, ImageFamily, embeds_in_layers
from llmconv.runtime.images.gemma4 import Gemma4Images
from llmconv.runtime.images.pixtral import PixtralImages
from llmconv.runtime.images.qwen_vl import DeepstackedQwenImages, QwenImages, WindowedQwenImages
from llmconv.tensors import Array

KINDS = "token_type_ids"
"""Which tokens stand for features, 1 or 0, int64."""


class Gemma3Images(ImageFamily):
    """Images of one size between two tokens that mark their start and end."""

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


MASK = "pixel_attention_mask"


class Idefics3Images(ImageFamily):
    """`pixel_values` are [prompts, tiles, channels, height, width]; tiles of zeros fill prompts with fewer tiles."""

    def text_of_image(self, placeholder: str, processor: Any) -> str:
        """The placeholder alone, as in the chat templates of these models."""
        return placeholder

    def runs(self, given: Given) -> Iterator[Given]:
        """One run for all tiles; raises InputRefused for a tile with padding, or no tile at all.

        `given` has `pixel_values`, float [prompts, tiles, channels, height, width], and `pixel_attention_mask`, int
        [prompts, tiles, height, width], 0 for padding.
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


class Llama4Images(ImageFamily):
    """Tiles, which the processor lists for all images together."""

    tensors = "pt"

    def text_of_image(self, placeholder: str, processor: Any) -> str:
        """The placeholder alone, as in the chat template of these models."""
        return placeholder

    def marker(self, processor: Any, placeholder: str) -> str:
        """The token of an image, which the processor replaces by tokens of patches."""
        return str(processor.image_token)


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
"""By `model_type`; `export.vision.towers.VISION_TOWERS` has the same rows."""


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
        raise MalformedInput(
            f"transformers cannot read the config in `{folder}`: {first_line(error)}",
            hint="copy `config.json` of the original model again",
        ) from error
    return image_family(config)
