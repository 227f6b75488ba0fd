"""Mamba-2: a layer keeps the window of its convolution and one matrix per head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmconv.export.caches.convolution import CONVOLVE
from llmconv.export.caches.kind import CacheKind, CacheState, first
from llmconv.export.caches.scan_functions import CHUNKS, call
from llmconv.export.caches.traced_layers import TracedCache
from llmconv.runtime.cache_names import CONVOLUTION, RECURRENT

FUNCTION = (
    """
StateSpace (x, dt, A, B, C, past) => (y, present)
{"""
    + CHUNKS
    + """
    dt_column = Unsqueeze (dt, last)
    driven = Mul (x, dt_column)
    log_decay = Mul (dt, A)
    x_padded = Pad (driven, pads, nothing, axis)
    a_padded = Pad (log_decay, pads, nothing, axis)
    B_padded = Pad (B, pads, nothing, axis)
    C_padded = Pad (C, pads, nothing, axis)

    x_sizes = Shape (x)
    B_sizes = Shape (B)
    two = Constant <value_ints = [2]> ()
    three = Constant <value_ints = [3]> ()
    batch = Slice (x_sizes, zero, one)
    heads = Slice (x_sizes, two, three)
    width = Slice (x_sizes, three, most)
    groups = Slice (B_sizes, two, three)
    states = Slice (B_sizes, three, most)
    heads_per_group = Div (heads, groups)
    x_shape = Concat <axis = 0> (batch, chunks, chunk, groups, heads_per_group, width)
    a_shape = Concat <axis = 0> (batch, chunks, chunk, groups, heads_per_group)
    B_shape = Concat <axis = 0> (batch, chunks, chunk, groups, one, states)
    x_chunks = Reshape (x_padded, x_shape)
    a_chunks = Reshape (a_padded, a_shape)
    B_chunks = Reshape (B_padded, B_shape)
    C_chunks = Reshape (C_padded, B_shape)
    x_t = Transpose <perm = [1, 0, 3, 4, 5, 2]> (x_chunks)
    x_c = Transpose <perm = [1, 0, 3, 4, 2, 5]> (x_chunks)
    a_c = Transpose <perm = [1, 0, 3, 4, 2]> (a_chunks)
    B_c = Transpose <perm = [1, 0, 3, 4, 2, 5]> (B_chunks)
    B_t = Transpose <perm = [1, 0, 3, 4, 5, 2]> (B_chunks)
    C_c = Transpose <perm = [1, 0, 3, 4, 2, 5]> (C_chunks)

    a_column = Unsqueeze (a_c, last)
    a_after = Where (after, a_column, nothing)
    row_axis = Constant <value_int = -2> ()
    sums = CumSum (a_after, row_axis)
    between = Where (seen, sums, never)
    decay = Exp (between)
    last_axis = Constant <value_int = -1> ()
    from_start = CumSum (a_c, last_axis)
    start_decay = Exp (from_start)
    start_column = Unsqueeze (start_decay, last)

    scores = MatMul (C_c, B_t)
    weights = Mul (scores, decay)
    inside = MatMul (weights, x_c)

    end_decay = Gather <axis = -2> (decay, last_axis)
    end_column = Unsqueeze (end_decay, last)
    B_decayed = Mul (B_c, end_column)
    written = MatMul (x_t, B_decayed)
    chunk_decay = Gather <axis = -1> (start_decay, last_axis)
    matrix_axes = Constant <value_ints = [-2, -1]> ()
    chunk_factor = Unsqueeze (chunk_decay, matrix_axes)

    past_shape = Concat <axis = 0> (batch, groups, heads_per_group, width, states)
    past_grouped = Reshape (past, past_shape)
    final, before = Scan <
        num_scan_inputs = 2,
        body = chunk_step (
            float[b, g, r, p, n] state, float[b, g, r, p, n] written_z, float[b, g, r, u, v] factor_z
        ) => (float[b, g, r, p, n] next, float[b, g, r, p, n] start)
        {
            start = Identity (state)
            kept = Mul (state, factor_z)
            next = Add (kept, written_z)
        }
    > (past_grouped, written, chunk_factor)
    past_sizes = Shape (past)
    present = Reshape (final, past_sizes)

    before_t = Transpose <perm = [0, 1, 2, 3, 5, 4]> (before)
    C_decayed = Mul (C_c, start_column)
    outside = MatMul (C_decayed, before_t)
    both = Add (inside, outside)
    by_token = Transpose <perm = [1, 0, 4, 2, 3, 5]> (both)
    flat_shape = Concat <axis = 0> (batch, padded, heads, width)
    flat = Reshape (by_token, flat_shape)
    y = Slice (flat, zero, length, axis)
}
"""
)
"""The state space dual of Mamba-2: attention with decays within a chunk, a recurrence between chunks.

    state = exp(dt A) state + dt x Bᵀ      y = state C      for each head

x, y [b, L, h, p]; dt [b, L, h]; A [h]; B, C [b, L, g, n], each for h / g heads; past, present [b, h, p, n].
arXiv:2405.21060, section 6. Decays between two tokens are sums, never differences, so there is no cancellation.
"""


def chunk_scan(  # noqa: PLR0913 - transformers calls it
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
        dt: time step, `[batch, sequence, heads]`.
        A: `[heads]`.
        B: `[batch, sequence, groups, states]`.
        C: `[batch, sequence, groups, states]`.
        D: skip connection, `[heads]`, or None.
        dt_bias: bias of the time step, `[heads]`, or None.
        initial_states: `[batch, heads, head_dim, states]`.
        dt_limit: limits of the time step; transformers ignores them in a single step after a past.

    Returns:
        The output, with the shape of `hidden_states`, and the state, with the shape of `initial_states`, both float32.
    """
    assert initial_states is not None
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    if tuple(dt_limit) != (0.0, float("inf")):
        dt = torch.where(_is_step(), dt, dt.clamp(*dt_limit))
    inputs = [hidden_states, dt, A, B, C, initial_states]
    output, state = call("StateSpace", inputs, [hidden_states.shape, initial_states.shape])
    return (output if D is None else output + hidden_states.float() * D[..., None]), state


def _is_step() -> Tensor:
    """Whether this is a call with one token after a past, in which transformers does not limit the time step."""
    assert TracedCache.is_step is not None
    return TracedCache.is_step


def _states(config: Any) -> tuple[CacheState, ...]:
    heads = first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    size = first(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    states = first(config, "mamba_d_state", "ssm_state_size", "state_size")
    groups = first(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    window = (heads * size + 2 * groups * states, first(config, "mamba_d_conv", "conv_kernel"))
    return CacheState(CONVOLUTION, window), CacheState(RECURRENT, (heads, size, states))


KIND = CacheKind(_states, {**CONVOLVE, "mamba2_chunk_scan": chunk_scan}, {"StateSpace": FUNCTION})
