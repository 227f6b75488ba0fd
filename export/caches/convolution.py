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
    """A depthwise convolution over columns that begin with the window: `[batch, channels, 1 + sequence]`.

    Callers keep the last `sequence` columns.

    Args:
        hidden_states: `[batch, channels, kernel + sequence]`.
        weight: `[channels, kernel]`.
        bias: `[channels]`, or None.
        activation: name of the activation function, or None.
    """
    result = F.conv1d(hidden_states.to(weight.dtype), weight.unsqueeze(1), bias, groups=weight.shape[0])
    result = result if activation is None else ACT2FN[activation](result)
    return result.to(hidden_states.dtype)


def _states(config: Any) -> tuple[CacheState, ...]:
    return (CacheState(CONVOLUTION, (config.hidden_size, config.conv_L_cache)),)


CONVOLVE = {"causal_conv1d_fn": convolve}
KIND = CacheKind(_states, CONVOLVE)
