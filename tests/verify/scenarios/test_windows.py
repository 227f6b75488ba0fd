"""Sizes of windows, under the names that families use."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from llmconv.verify.scenarios.calls import windows_of
from tests.conftest import DECODER

FIELDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "mistral": ({**DECODER, "sliding_window": 600}, (600,)),
    "llama": (DECODER, ()),
    "gemma2": ({**DECODER, "sliding_window": 8}, (8,)),
    "gpt_neo": ({"window_size": 40, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}, (40,)),
    "llama4_text": ({"attention_chunk_size": 8192}, (8192,)),
    "recurrent_gemma": ({"attention_window_size": 2048}, (2048,)),
    "qwen2": ({**DECODER, "use_sliding_window": False, "sliding_window": 77, "max_window_layers": 3}, ()),
    "mamba": ({"num_hidden_layers": 2}, ()),
}


@pytest.mark.parametrize("model_type", FIELDS)
def test_the_windows_of_a_family_are_found(model_type: str) -> None:
    fields, expected = FIELDS[model_type]
    assert windows_of(AutoConfig.for_model(model_type, **fields)) == expected
