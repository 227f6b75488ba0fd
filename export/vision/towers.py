"""The table of vision towers."""

from __future__ import annotations

from llmconv.export.vision.anyres import ANYRES
from llmconv.export.vision.idefics3 import IDEFICS3
from llmconv.export.vision.llama4 import LLAMA4
from llmconv.export.vision.pixtral import PIXTRAL
from llmconv.export.vision.tower import VisionTower

VISION_TOWERS: dict[str, VisionTower] = {
    "aya_vision": VisionTower(),
    "got_ocr2": VisionTower(alike=False),  # layers with windows between layers without
    "idefics3": IDEFICS3,
    "internvl": VisionTower(),
    "llama4": LLAMA4,
    "llava": VisionTower(),
    "llava_next": ANYRES,
    "llava_onevision": ANYRES,
    "mistral3": PIXTRAL,
    "smolvlm": IDEFICS3,
    "vipllava": VisionTower(),
}
"""By `model_type`; `runtime.images.families.IMAGE_FAMILIES` has the same rows."""
