"""Tiny models whose images become tiles or keep their sizes, with a processor and a tokenizer of characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.builders.seeded import save_seeded
from tests.builders.seeing import CLIP, IMAGE_ID, IMAGE_TOKEN
from tests.builders.stand_in_processors import LLAMA4_TOKENS, Llama4Tiles, PixtralText
from tests.builders.talking import save_letters
from tests.conftest import DECODER

GRIDS = [[12, 24], [24, 12], [24, 24], [36, 12], [12, 36], [36, 36]]

TOWER = {**CLIP, "num_hidden_layers": 4, "image_size": 12}
TEXT = {**DECODER, "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 103, "max_position_embeddings": 512}

IDEFICS: dict[str, Any] = {
    "vision_config": {**TOWER, "model_type": None, "image_size": 24},
    "image_token_id": 97,
    "scale_factor": 3,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "idefics3": IDEFICS,
    "llama4": {
        "text_config": {
            **TEXT,
            "model_type": "llama4_text",
            "head_dim": 16,
            "intermediate_size_mlp": 80,
            "num_local_experts": 3,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 0],
        },
        "vision_config": {
            **TOWER,
            "model_type": None,
            "hidden_size": 32,
            "intermediate_size": 128,
            "image_size": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
            "vision_output_dim": 24,
        },
        "image_token_index": 97,
        "boi_token_index": 98,
        "eoi_token_index": 99,
    },
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

MARKERS = {"idefics3": "<image>", "llama4": "<|image|>", "smolvlm": "<image>"}
"""Text of the placeholder token where it is not `~`."""

UNLOADABLE = ("llama4", "llava_onevision", "mistral3")
"""Their processors need torchvision before transformers loads them."""


def save_tiled(model_type: str, folder: Path) -> Any:
    """Saves a seeded float32 model without graphs, its tokenizer and, where it can be loaded, its processor.

    Args:
        model_type: a row of `CONFIGS`.
        folder: to be made.

    Returns:
        The processor.
    """
    import transformers  # noqa: PLC0415

    config = transformers.AutoConfig.for_model(model_type, **fields_of(model_type))
    save_seeded(config, folder, noise=0.1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_letters(folder))
    processor = PROCESSORS[model_type](transformers, tokenizer)
    if model_type not in UNLOADABLE:
        processor.save_pretrained(folder)
    return processor


def fields_of(model_type: str) -> dict[str, Any]:
    """The fields of a config.

    Args:
        model_type: a row of `CONFIGS`.
    """
    fields = {"text_config": TEXT, **CONFIGS[model_type]}
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


def _llama4(transformers: Any, tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": list(LLAMA4_TOKENS)})
    return Llama4Tiles(tokenizer)


def _pixtral(transformers: Any, tokenizer: Any) -> Any:
    size, patch = {"longest_edge": 40}, {"height": 8, "width": 8}
    return PixtralText(transformers.PixtralImageProcessorPil(size=size, patch_size=patch), tokenizer)


PROCESSORS = {
    "idefics3": _idefics3,
    "llama4": _llama4,
    "llava_next": _llava_next,
    "llava_onevision": _onevision,
    "mistral3": _pixtral,
    "smolvlm": _idefics3,
}
