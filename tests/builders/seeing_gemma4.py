"""A tiny Gemma 4 without embeddings per layer: images of any size, whose tokens see each other in some layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.builders.seeded import save_seeded
from tests.builders.talking import save_letters
from tests.conftest import DECODER

IMAGE_TOKEN, BOI, EOI = "~", "{", "}"
IMAGE_ID, BOI_ID, EOI_ID = 95, 92, 94
"""The tokens of these characters."""

TEXT = {
    **DECODER,
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 4,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}

TOWER = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 2,
    "pooling_kernel_size": 3,
    "position_embedding_size": 256,
    "standardize": True,
    "use_clipped_linears": True,
}

LIMITS = {"min": -1.5, "max": 1.2}
"""Of the inputs and outputs of linear layers in the tower, so that some are reached."""


def save_gemma4(folder: Path, **changes: Any) -> Path:
    """A seeded float32 Gemma 4 with processor and tokenizer, without graphs.

    Args:
        folder: to be made.
        changes: fields of the text model's config.
    """
    import transformers  # noqa: PLC0415

    config = transformers.AutoConfig.for_model(
        "gemma4",
        text_config={**TEXT, **changes},
        vision_config=TOWER,
        image_token_id=IMAGE_ID,
        boi_token_id=BOI_ID,
        eoi_token_id=EOI_ID,
        video_token_id=0,
        audio_token_id=0,
    )
    save_seeded(config, folder, change=_set_buffers)
    _save_processor(save_letters(folder))
    return folder


def _set_buffers(model: Any) -> None:
    for name, buffer in model.named_buffers():
        _set_stored(name.rpartition(".")[2], buffer)


def _set_stored(name: str, buffer: Any) -> None:
    """Numbers that a checkpoint has in place of the defaults."""
    import torch  # noqa: PLC0415

    if name in ("std_bias", "std_scale"):
        buffer.copy_(torch.randn_like(buffer) * 0.3 + (name == "std_scale"))
    elif name.rpartition("_")[0] in ("input", "output"):
        buffer.fill_(LIMITS[name.rpartition("_")[2]])


def _save_processor(folder: Path) -> None:
    import transformers  # noqa: PLC0415

    special = {"image_token": IMAGE_TOKEN, "boi_token": BOI, "eoi_token": EOI}
    transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=special).save_pretrained(folder)
    images = transformers.Gemma4ImageProcessorPil(patch_size=2, max_soft_tokens=70, pooling_kernel_size=3)
    parts = {"processor_class": "Gemma4Processor", "image_processor": images.to_dict(), "video_processor": {}}
    (folder / "processor_config.json").write_text(json.dumps(parts))
