"""Mamba-2: a layer keeps the window of its convolution and one matrix per head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmconv.export.caches.convolution import CONVOLVE
from llmconv.export.caches.functions import call
from llmconv.export.caches.kind import CacheKind, State, first
from llmconv.runtime.cache_names import CONVOLUTION, RECURRENT


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """transformers' `mamba2_chunk_scan` as one node.

    Args:
        hidden_states: `[batch, sequence, heads, head_dim]`.
        dt: `[batch, sequence, heads]`.
        A: `[heads]`.
        B: `[batch, sequence, groups, states]`; `C` likewise.
        initial_states: `[batch, heads, head_dim, states]`.

    Returns:
        The output, shaped as `hidden_states`, and the state, shaped as `initial_states`.
    """
    assert initial_states is not None
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    if tuple(dt_limit) != (0.0, float("inf")):
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    inputs = [hidden_states, dt, A, B, C, initial_states]
    output, state = call("StateSpace", inputs, [hidden_states.shape, initial_states.shape])
    return (output if D is None else output + hidden_states * D[..., None]), state


def _states(config: Any) -> tuple[State, ...]:
    heads = first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    size = first(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    states = first(config, "mamba_d_state", "ssm_state_size", "state_size")
    groups = first(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    window = (heads * size + 2 * groups * states, first(config, "mamba_d_conv", "conv_kernel"))
    return State(CONVOLUTION, window), State(RECURRENT, (heads, size, states))


KIND = CacheKind(_states, {**CONVOLVE, "mamba2_chunk_scan": chunk_scan})
