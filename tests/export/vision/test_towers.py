"""The two tables of families with images, one with torch and one without, agree."""

from __future__ import annotations

from llmconv.export.vision_towers import VISION_TOWERS
from llmconv.runtime.images.families import IMAGE_FAMILIES


def test_both_tables_have_the_same_rows_in_order() -> None:
    assert list(VISION_TOWERS) == list(IMAGE_FAMILIES) == sorted(VISION_TOWERS)
