"""Short causal convolutions (LFM2): a layer keeps the last columns of the input of its convolution.

They are put in front of the new columns, so the convolution needs no padding and a prompt is handled like a step.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from llmconv.export.caches.kind import CacheKind, CacheState
from llmconv.runtime.cache_names import CONVOLUTION


def convolve(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **unused: Any
) -> Tensor:
    """Depthwise convolution of `[batch, channels, kernel + sequence]`, which begins with the window.

    Returns `[batch, channels, 1 + sequence]`, of which callers keep the last `sequence` columns. `weight` is
    `[channels, kernel]`, `bias` `[channels]` or None, and `activation` a function's name or None.
    """
    result = F.conv1d(hidden_states.to(weight.dtype), weight.unsqueeze(1), bias, groups=weight.shape[0])
    result = result if activation is None else ACT2FN[activation](result)
    return result.to(hidden_states.dtype)


def _states(config: Any) -> tuple[CacheState, ...]:
    return (CacheState(CONVOLUTION, (config.hidden_size, config.conv_L_cache)),)


CONVOLVE = {"causal_conv1d_fn": convolve}
KIND = CacheKind(_states, CONVOLVE)
