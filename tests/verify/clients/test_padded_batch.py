"""The layout of a client's prompts and tokens."""

from __future__ import annotations

import pytest

from llmconv.verify.clients.comparison import PaddedBatch


@pytest.mark.parametrize(
    ("side", "ids", "mask"),
    [
        ("left", [[5, 6, 8, 9], [0, 7, 4, 0]], [[1, 1, 1, 1], [0, 1, 1, 0]]),
        ("right", [[5, 6, 8, 9], [7, 0, 4, 0]], [[1, 1, 1, 1], [1, 0, 1, 0]]),
    ],
)
def test_padding_is_on_its_side_of_the_prompt_and_after_the_end(
    side: str, ids: list[list[int]], mask: list[list[int]]
) -> None:
    batch = PaddedBatch([[5, 6], [7]], [[8, 9], [4]], side)
    assert batch.ids.tolist() == ids
    assert batch.mask.tolist() == mask
