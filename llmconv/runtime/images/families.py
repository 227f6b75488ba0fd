"""The table of families of multimodal models whose images reach the graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconv.errors import MalformedInput, first_line
from llmconv.runtime.images.anyres import AnyresImages, OneVisionImages
from llmconv.runtime.images.family import ImageFamily
from llmconv.runtime.images.gemma3 import Gemma3Images
from llmconv.runtime.images.gemma4 import Gemma4Images
from llmconv.runtime.images.idefics3 import Idefics3Images
from llmconv.runtime.images.llama4 import Llama4Images
from llmconv.runtime.images.pixtral import PixtralImages
from llmconv.runtime.images.placeholders import embeds_in_layers
from llmconv.runtime.images.qwen_vl import DeepstackedQwenImages, QwenImages, WindowedQwenImages

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
    """The family of a model; None if its images do not reach the graphs.

    Args:
        config: the whole model's transformers config.
    """
    family = IMAGE_FAMILIES.get(config.model_type)
    takes_images = getattr(config, "vision_config", None) is not None and not embeds_in_layers(config)
    return family(config) if family and takes_images else None


def family_in(folder: Path) -> ImageFamily | None:
    """The family of the model in a folder, see `image_family`.

    Raises:
        MalformedInput: transformers cannot read `config.json`.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - only for models with a vision graph

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # an invalid config may raise anything
        raise MalformedInput(
            f"transformers cannot read the config in `{folder}`: {first_line(error)}",
            hint="copy `config.json` of the original model again",
        ) from error
    return image_family(config)
