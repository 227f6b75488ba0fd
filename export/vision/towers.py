"""The table of vision towers."""

from __future__ import annotations

from llmconv.export.vision.anyres import AnyresFeatures
from llmconv.export.vision.idefics3 import TileFeatures
from llmconv.export.vision.tower import IMAGES, VisionTower
from llmconv.runtime.images.anyres import NEWLINE
from llmconv.runtime.images.family import IMAGE_FEATURES

ANYRES = VisionTower(module=AnyresFeatures, outputs=((IMAGE_FEATURES, IMAGES), (NEWLINE, 1)))

VISION_TOWERS: dict[str, VisionTower] = {
    "aya_vision": VisionTower(),
    "got_ocr2": VisionTower(alike=False),  # layers with windows between layers without
    "idefics3": VisionTower(module=TileFeatures),
    "internvl": VisionTower(),
    "llava": VisionTower(),
    "llava_next": ANYRES,
    "llava_onevision": ANYRES,
    "smolvlm": VisionTower(module=TileFeatures),
    "vipllava": VisionTower(),
}
"""By `model_type`; `runtime.images.families.IMAGE_FAMILIES` has the same rows."""
