"""Findings of the search name what is wrong with constants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmconv.verify.bisect import findings


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_frequencies_that_torch_rounded_are_named(name: str) -> None:
    frequencies = 1 / 10000 ** (torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    rounded = frequencies.float().to(getattr(torch, name)).double()
    text = findings._table_text(rounded.numpy(), frequencies.float().double().numpy())
    assert text == f"rotary frequencies rounded to {name} in the graph"
    assert not np.array_equal(rounded, frequencies)
