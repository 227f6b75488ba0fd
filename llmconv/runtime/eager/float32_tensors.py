"""The tensors that transformers loads in float32 whatever the dtype of the model: routers' biases, some norms."""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Pattern of the names of the tensors that `from_pretrained` loads in float32 in a model of another dtype.

    Args:
        model: of transformers, on any device.
        dtype: of the model.
    """
    plan = model._get_dtype_plan(dtype)
    found: re.Pattern[str] | None = build_glob_alternation(list(plan))[0] if plan else None
    return found
