"""Tiny models whose images become tiles or keep their sizes, with a processor and a tokenizer of characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.builders.seeing import CLIP, IMAGE_ID, IMAGE_TOKEN
from tests.builders.talking import save_letters
from tests.conftest import DECODER

GRIDS = [[12, 24], [24, 12], [24, 24], [36, 12], [12, 36], [36, 36]]

TOWER = {**CLIP, "num_hidden_layers": 4, "image_size": 12}
TEXT = {**DECODER, "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 512}

IDEFICS: dict[str, Any] = {
    "vision_config": {**TOWER, "model_type": None, "image_size": 24},
    "image_token_id": 97,
    "scale_factor": 3,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "idefics3": IDEFICS,
    "llava_next": {"vision_config": TOWER, "image_token_index": IMAGE_ID, "image_grid_pinpoints": GRIDS},
    "llava_onevision": {
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": IMAGE_ID,
        "video_token_index": 94,
        "image_grid_pinpoints": GRIDS,
        "vision_aspect_ratio": "anyres_max_3",
    },
    "mistral3": {
        "vision_config": {**TOWER, "model_type": "pixtral", "hidden_size": 32, "num_attention_heads": 4},
        "image_token_index": IMAGE_ID,
    },
    "smolvlm": IDEFICS,
}

MARKERS = {"idefics3": "<image>", "smolvlm": "<image>"}
"""Text of the placeholder token where it is not `~`."""

UNLOADABLE = ("llava_onevision", "mistral3")
"""Their processors need torchvision before transformers loads them."""


def save_tiled(model_type: str, folder: Path) -> Any:
    """Saves a seeded float32 model without graphs, its tokenizer and, where it can be loaded, its processor.

    Args:
        model_type: a row of `CONFIGS`.
        folder: to be made.

    Returns:
        The processor.
    """
    import torch  # noqa: PLC0415 - only the tests that ask for a model pay for it
    import transformers  # noqa: PLC0415

    config = transformers.AutoConfig.for_model(model_type, text_config=TEXT, **_fields(model_type))
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_letters(folder))
    processor = PROCESSORS[model_type](transformers, tokenizer)
    if model_type not in UNLOADABLE:
        processor.save_pretrained(folder)
    return processor


def _fields(model_type: str) -> dict[str, Any]:
    fields = CONFIGS[model_type]
    tower = {name: value for name, value in fields["vision_config"].items() if value is not None}
    return {**fields, "vision_config": tower}


def _idefics3(transformers: Any, tokenizer: Any) -> Any:
    """Also for SmolVLM, whose own class needs torchvision and writes the same text."""
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 48}, max_image_size={"longest_edge": 24})
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)


def _llava_next(transformers: Any, tokenizer: Any) -> Any:
    size = {"height": 12, "width": 12}
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 12}, crop_size=size, image_grid_pinpoints=GRIDS
    )
    return transformers.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE_TOKEN,
    )


def _onevision(transformers: Any, tokenizer: Any) -> Any:
    class WithoutVideos(transformers.LlavaOnevisionProcessor):  # type: ignore[misc]
        """Its processor of videos needs torchvision."""

        def check_argument_for_proper_class(self, name: str, given: Any) -> None:
            """Accepts None."""

    images = transformers.LlavaOnevisionImageProcessorPil(size={"height": 12, "width": 12}, image_grid_pinpoints=GRIDS)
    return WithoutVideos(
        images,
        tokenizer,
        None,
        num_image_tokens=9,
        vision_feature_select_strategy="full",
        image_token=IMAGE_TOKEN,
        video_token="}",
        vision_aspect_ratio="anyres_max_3",
    )


@dataclass(frozen=True)
class PixtralText:
    """The text and images of transformers' `PixtralProcessor`, whose module needs torchvision.

    Attributes:
        images: processor of images.
        tokenizer: of characters.
    """

    images: Any
    tokenizer: Any

    def __call__(self, text: Sequence[str], images: Any, return_tensors: str, **options: Any) -> dict[str, Any]:
        """Tokens and images of one prompt, tensors or arrays.

        Args:
            text: one prompt.
            images: of Pillow, of one prompt.
            return_tensors: `pt` or `np`.
            options: of the tokenizer.
        """
        import torch  # noqa: PLC0415

        found = self.images(images[0], return_tensors=return_tensors)
        first, *others = text[0].split(IMAGE_TOKEN)
        sizes = np.asarray(found["image_sizes"]).tolist()
        parts = [_pixtral_rows(*size) + other for size, other in zip(sizes, others, strict=True)]
        ids = self.tokenizer(first + "".join(parts), **options)["input_ids"]
        tokens = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
        made = tokens if return_tensors == "np" else {name: torch.from_numpy(one) for name, one in tokens.items()}
        return {**made, **found}


def _pixtral_rows(height: int, width: int) -> str:
    """Rows of placeholders, with a token after each."""
    return "|".join([IMAGE_TOKEN * (width // 8)] * (height // 8)) + "}"


def _pixtral(transformers: Any, tokenizer: Any) -> Any:
    size, patch = {"longest_edge": 40}, {"height": 8, "width": 8}
    return PixtralText(transformers.PixtralImageProcessorPil(size=size, patch_size=patch), tokenizer)


PROCESSORS = {
    "idefics3": _idefics3,
    "llava_next": _llava_next,
    "llava_onevision": _onevision,
    "mistral3": _pixtral,
    "smolvlm": _idefics3,
}
