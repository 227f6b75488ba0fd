"""Tiny models of Qwen2-VL and later with the processor of their images and a tokenizer of characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconv.runtime.images.family import without_videos
from tests.builders.seeded import save_seeded
from tests.builders.talking import save_letters
from tests.conftest import DECODER

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, VIDEO = range(len(TOKENS))
FIRST = 96
"""The first of their numbers, after those of the characters."""

PLACEHOLDER = TOKENS[START] + TOKENS[IMAGE] + TOKENS[END]
"""What stands for one image in a prompt."""

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '" + PLACEHOLDER + "' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}{{ ';' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)

PATCHES = {"num_heads": 2, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

WINDOWS = {"window_size": 16, "fullatt_block_indexes": [2, 5]}

DEEP = {"num_position_embeddings": 25, "deepstack_visual_indexes": [1, 2, 4]}

VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 5, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {"depth": 6, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, **WINDOWS},
    "qwen3_vl": {"depth": 6, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, **DEEP},
}
"""Towers by `model_type`."""
VISION["qwen3_vl_moe"] = VISION["qwen3_vl"]

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {"head_dim": 16, "num_hidden_layers": 8},
    "qwen3_vl_moe": {"head_dim": 16, "num_hidden_layers": 8, **EXPERTS},
}
"""Fields of the text model by `model_type`."""


def save_qwen(folder: Path, model_type: str, **changes: Any) -> Path:
    """A seeded float32 model with processor and tokenizer, without graphs.

    Args:
        folder: to be made.
        model_type: a key of `VISION`.
        changes: fields of the config.
    """
    import transformers  # noqa: PLC0415

    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {**DECODER, "vocab_size": FIRST + len(TOKENS), "rope_parameters": rotary, **TEXT[model_type]}
    tokens = {"image_token_id": FIRST + IMAGE, "video_token_id": FIRST + VIDEO}
    around = {"vision_start_token_id": FIRST + START, "vision_end_token_id": FIRST + END}
    vision = {**PATCHES, **VISION[model_type]}
    config = transformers.AutoConfig.for_model(
        model_type, text_config=text, vision_config=vision, **tokens, **around, **changes
    )
    save_seeded(config, folder)
    _save_processor(save_letters(folder), transformers.PROCESSOR_MAPPING[type(config)])
    return folder


def _save_processor(folder: Path, kind: Any) -> None:
    import transformers  # noqa: PLC0415

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 64 * 24}
    )
    without_videos(kind)(images, tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
