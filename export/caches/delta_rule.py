"""The gated delta rule (Qwen3-Next): a layer keeps the window of its convolution and one matrix per value head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmconv.export.caches.convolution import CONVOLVE
from llmconv.export.caches.functions import call
from llmconv.export.caches.kind import CacheKind, State
from llmconv.runtime.cache_names import CONVOLUTION, RECURRENT

NORM_EPSILON = 1e-6
"""Of the keys' and queries' norm, inside transformers' function and not in a config."""


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """transformers' `torch_chunk_gated_delta_rule` as one node.

    Args:
        query: `[batch, sequence, key_heads, key_dim]`; `key` likewise.
        value: `[batch, sequence, heads, value_dim]`.
        g: the logarithm of the decay, `[batch, sequence, heads]`; `beta` likewise.
        initial_state: `[batch, heads, key_dim, value_dim]`.

    Returns:
        The output, shaped as `value`, and the state.
    """
    assert initial_state is not None
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    repeats = value.shape[2] // key.shape[2]
    if repeats > 1:
        query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    return call("DeltaRule", [value, query, key, g, beta, initial_state], [value.shape, initial_state.shape])


def _states(config: Any) -> tuple[State, ...]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    matrix = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return State(CONVOLUTION, (2 * keys + values, config.linear_conv_kernel_dim)), State(RECURRENT, matrix)


KIND = CacheKind(_states, {**CONVOLVE, "torch_chunk_gated_delta_rule": delta_rule})
