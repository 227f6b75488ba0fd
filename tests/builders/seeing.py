"""A tiny LLaVA with a CLIP tower, a processor of images and a tokenizer of characters; other towers without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.builders.seeded import save_seeded
from tests.builders.talking import save_letters
from tests.conftest import DECODER

IMAGE_TOKEN = "~"
IMAGE_ID = 95
"""The token of `~`."""

SIZE, PATCH = 8, 4

CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": PATCH,
    "projection_dim": 16,
}

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '~' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ ';' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


SIGLIP = {name: value for name, value in CLIP.items() if name != "projection_dim"} | {
    "model_type": "siglip_vision_model"
}
INTERN = {**SIGLIP, "model_type": "internvl_vision", "image_size": [SIZE, SIZE], "patch_size": [PATCH, PATCH]}
SAM = {
    "hidden_size": 16,
    "output_channels": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 16,
    "window_size": 2,
    "global_attn_indexes": [1],
    "mlp_dim": 32,
}

TOWERS: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "text_config": {**DECODER, "model_type": "cohere2", "head_dim": 16},
        "vision_config": SIGLIP,
        "alignment_intermediate_size": 32,
    },
    "got_ocr2": {"text_config": {**DECODER, "model_type": "qwen2"}, "vision_config": SAM},
    "internvl": {"text_config": {**DECODER, "model_type": "qwen2"}, "vision_config": INTERN},
    "llava": {"text_config": {**DECODER, "model_type": "llama"}, "vision_config": CLIP},
    "vipllava": {
        "text_config": {**DECODER, "model_type": "llama"},
        "vision_config": CLIP,
        "vision_feature_layers": [-2, -4, 2],
    },
}
"""By `model_type`: configurations whose placeholder is `IMAGE_ID`."""


def save_tower(model_type: str, folder: Path, **changes: Any) -> Path:
    """A seeded float32 model of a type in `TOWERS`, without processor, tokenizer and graphs.

    Args:
        model_type: its type.
        folder: to be made.
        changes: fields of the config.
    """
    import transformers  # noqa: PLC0415

    config = transformers.AutoConfig.for_model(
        model_type, **{**TOWERS[model_type], "image_token_id": IMAGE_ID, "image_token_index": IMAGE_ID, **changes}
    )
    return save_seeded(config, folder)


def save_seeing(folder: Path, **changes: Any) -> Path:
    """A seeded float32 LLaVA with processor and tokenizer, without graphs.

    Args:
        folder: to be made.
        changes: fields of the config.
    """
    save_tower("llava", folder, **changes)
    _save_processor(save_letters(folder))
    return folder


def _save_processor(folder: Path) -> None:
    import transformers  # noqa: PLC0415

    images = transformers.LlavaImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE_TOKEN,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def save_picture(path: Path, seed: int = 0, size: tuple[int, int] = (20, 13)) -> Path:
    """An image of random colors.

    Args:
        path: with the suffix of its format.
        seed: of the colors.
        size: width and height in pixels.
    """
    from PIL import Image  # noqa: PLC0415

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path
