"""The reference: tokens of transformers' own generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Expected = Callable[..., list[int]]


@pytest.fixture(scope="session")
def expected() -> Expected:
    """`expected(folder, ids, **fields)`: the new tokens of `transformers.generate`, end token included."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    models: dict[Path, Any] = {}
    torch.set_num_threads(1)  # tiny models wait for threads more than they compute

    def tokens(folder: Path, ids: Sequence[int], **fields: Any) -> list[int]:
        model = models.setdefault(folder, None) or AutoModelForCausalLM.from_pretrained(folder).eval()
        models[folder] = model
        prompt = torch.tensor([list(ids)])
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **fields)
        return [int(token) for token in found[0, len(ids) :]]

    return tokens
