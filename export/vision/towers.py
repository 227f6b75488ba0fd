"""The table of vision towers."""

from __future__ import annotations

from llmconv.export.vision.gemma4 import GEMMA4
from llmconv.export.vision.tower import VisionTower

VISION_TOWERS: dict[str, VisionTower] = {
    "aya_vision": VisionTower(),
    "gemma3": VisionTower(),
    "gemma4": GEMMA4,
    "got_ocr2": VisionTower(alike=False),  # layers with windows between layers without
    "internvl": VisionTower(),
    "llava": VisionTower(),
    "vipllava": VisionTower(),
}
"""By `model_type`; `runtime.images.families.IMAGE_FAMILIES` has the same rows."""
