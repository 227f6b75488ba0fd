"""A tiny Gemma 3 with a SigLIP tower: tokens of an image attend to each other in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.builders.seeded import save_seeded
from tests.builders.seeing import SIZE, TEMPLATE
from tests.builders.talking import save_letters
from tests.conftest import DECODER

IMAGE_TOKEN, BOI, EOI = "~", "{", "}"
IMAGE_ID, BOI_ID, EOI_ID = 95, 92, 94
"""The tokens of these characters."""

TOKENS = 4
"""Number of features of an image, of 2 x 2 pooled patches each."""

SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 2,
}

GEMMA_TEXT = {
    **DECODER,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 3,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}


def save_gemma3(folder: Path, **changes: Any) -> Path:
    """A seeded float32 Gemma 3 with processor and tokenizer, without graphs.

    Args:
        folder: to be made.
        changes: fields of the text model's config.
    """
    import transformers  # noqa: PLC0415

    config = transformers.AutoConfig.for_model(
        "gemma3",
        text_config={**GEMMA_TEXT, **changes},
        vision_config=SIGLIP,
        mm_tokens_per_image=TOKENS,
        image_token_index=IMAGE_ID,
        boi_token_index=BOI_ID,
        eoi_token_index=EOI_ID,
    )
    save_seeded(config, folder)
    _save_processor(save_letters(folder))
    return folder


def _save_processor(folder: Path) -> None:
    import transformers  # noqa: PLC0415

    images = transformers.Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE})
    special = {"image_token": IMAGE_TOKEN, "boi_token": BOI, "eoi_token": EOI}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=special)
    template = TEMPLATE.replace("'~'", f"'{BOI}'")
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=TOKENS, chat_template=template).save_pretrained(
        folder
    )
