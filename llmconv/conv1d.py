"""Which weights transformers stores transposed, in×out: those of `Conv1D` (`transformers/pytorch_utils.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODULES = ("c_attn", "c_proj", "c_fc", "q_attn")
TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


def is_conv1d(config: Mapping[str, Any], weight: str) -> bool:
    """Whether the weight of this name, such as `h.0.attn.c_attn.weight`, is that of a `Conv1D`."""
    return config.get("model_type") in TYPES and weight.split(".")[-2:-1] in [[module] for module in MODULES]
