"""Mamba: a layer keeps the window of its convolution and one state per channel.

transformers' scan of several tokens starts from zeros even where a cache is given; the graph continues the state.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from llmconv.export.caches.convolution import CONVOLVE
from llmconv.export.caches.functions import call
from llmconv.export.caches.kind import CacheKind, State, first
from llmconv.export.caches.layers import TracedCache
from llmconv.runtime.cache_names import CONVOLUTION, RECURRENT


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """transformers' `mamba_selective_scan` as one node.

    Args:
        hidden_states: `[batch, channels, sequence]`; `dt` and `z` likewise.
        A: `[channels, states]`.
        B: `[batch, states, sequence]`; `C` likewise.

    Returns:
        The output `[batch, channels, sequence]` and the state `[batch, channels, states]`.
    """
    dt = dt if delta_bias is None else dt + delta_bias[..., None]
    dt = F.softplus(dt) if delta_softplus else dt
    past = TracedCache.last_read
    assert past is not None
    inputs = [hidden_states, dt, A, B.transpose(1, 2), C.transpose(1, 2), past]
    output, state = call("SelectiveScan", inputs, [hidden_states.shape, past.shape])
    output = output if D is None else output + hidden_states * D[None, :, None]
    return (output if z is None else output * F.silu(z)), state


def _states(config: Any) -> tuple[State, ...]:
    channels = int(first(config, "mamba_expand", "expand") * config.hidden_size)
    window = State(CONVOLUTION, (channels, first(config, "mamba_d_conv", "conv_kernel")))
    return (window, State(RECURRENT, (channels, first(config, "mamba_d_state", "state_size"))))


KIND = CacheKind(_states, {**CONVOLVE, "mamba_selective_scan": selective_scan})
