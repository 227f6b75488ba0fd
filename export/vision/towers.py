"""The table of vision towers."""

from __future__ import annotations

from llmconv.export.vision.anyres import ANYRES
from llmconv.export.vision.gemma4 import GEMMA4
from llmconv.export.vision.idefics3 import IDEFICS3
from llmconv.export.vision.llama4 import LLAMA4
from llmconv.export.vision.pixtral import PIXTRAL
from llmconv.export.vision.qwen_vl import (
    TOKENS,
    DeepstackedFeatures,
    PatchFeatures,
    WindowedFeatures,
    patches,
    patches_in_windows,
    patches_with_cells,
)
from llmconv.export.vision.tower import VisionTower
from llmconv.runtime.images.family import DEEPSTACK_FEATURES, IMAGE_FEATURES

OF_PATCHES = ((IMAGE_FEATURES, TOKENS),)
DEEP = (*OF_PATCHES, (DEEPSTACK_FEATURES, TOKENS))

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
    "smolvlm": IDEFICS3,
    "qwen2_5_vl": VisionTower(False, WindowedFeatures, patches_in_windows, OF_PATCHES),
    "qwen2_vl": VisionTower(True, PatchFeatures, patches, OF_PATCHES),
    "qwen3_vl": VisionTower(False, DeepstackedFeatures, patches_with_cells, DEEP),
    "qwen3_vl_moe": VisionTower(False, DeepstackedFeatures, patches_with_cells, DEEP),
    "vipllava": VisionTower(),
}
"""By `model_type`; `runtime.images.families.IMAGE_FAMILIES` has the same rows."""
