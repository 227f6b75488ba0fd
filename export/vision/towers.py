"""The table of vision towers."""

from __future__ import annotations

from llmconv.export.vision.anyres import ANYRES
from llmconv.export.vision.gemma4 import GEMMA4
from llmconv.export.vision.idefics3 import IDEFICS3
from llmconv.export.vision.llama4 import LLAMA4
from llmconv.export.vision.pixtral import PIXTRAL
from llmconv.export.vision.qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from llmconv.export.vision.tower import VisionTower

VISION_TOWERS: dict[str, VisionTower] = {
    "aya_vision": VisionTower(),
    "gemma3": VisionTower(),
    "gemma4": GEMMA4,
    "got_ocr2": VisionTower(alike=False),  # layers with windows between layers without
    "idefics3": IDEFICS3,
    "internvl": VisionTower(),
    "llama4": LLAMA4,
    "llava": VisionTower(),
    "llava_next": ANYRES,
    "llava_onevision": ANYRES,
    "mistral3": PIXTRAL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_vl": QWEN2_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "smolvlm": IDEFICS3,
    "vipllava": VisionTower(),
}
"""By `model_type`; `runtime.images.families.IMAGE_FAMILIES` has the same rows."""
