"""Short causal convolutions (LFM2), Mamba and Mamba 2: a window of the convolution, and one state per channel or head.

The window's columns are put in front of the new ones, so the convolution needs no padding and a prompt is handled like
a step. transformers' scan of several tokens starts from zeros even with a cache; the graph continues the state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from llmconv.export.caches import CacheKind, CacheState, first
from llmconv.export.caches.traced_layers import CHUNKS, RecordedStates, TracedCache, call
from llmconv.runtime.extra_inputs import CONVOLUTION, RECURRENT


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


CONVOLVE = {"causal_conv1d_fn": convolve}
CONVOLUTION_KIND = CacheKind(
    lambda config: (CacheState(CONVOLUTION, (config.hidden_size, config.conv_L_cache)),), CONVOLVE
)


SELECTIVE_SCAN_FUNCTION = """
SelectiveScan (x, dt, A, B, C, past) => (y, present)
{
    last = Constant <value_ints = [-1]> ()
    one = Constant <value_ints = [1]> ()
    present, y = Scan <
        num_scan_inputs = 4, scan_input_axes = [2, 2, 1, 1], scan_output_axes = [2],
        body = step (float[b, d, n] state, float[b, d] x_t, float[b, d] dt_t, float[b, n] B_t, float[b, n] C_t)
            => (float[b, d, n] next, float[b, d] y_t)
        {
            dt_column = Unsqueeze (dt_t, last)
            exponent = Mul (dt_column, A)
            decay = Exp (exponent)
            kept = Mul (state, decay)
            dx_t = Mul (dt_t, x_t)
            dx_column = Unsqueeze (dx_t, last)
            B_row = Unsqueeze (B_t, one)
            written = Mul (dx_column, B_row)
            next = Add (kept, written)
            C_column = Unsqueeze (C_t, last)
            read = MatMul (next, C_column)
            y_t = Squeeze (read, last)
        }
    > (past, x, dt, B, C)
}
"""
"""Mamba's selective scan, token by token: each channel d has n states of its own, so chunks are not possible.

    state = exp(dt A) state + dt x B      y = state C

x, dt, y [b, d, L]; A [d, n]; B, C [b, L, n]; past, present [b, d, n]. arXiv:2312.00752, equation 2.
"""


def selective_scan(  # noqa: PLR0913 - transformers calls it
    hidden_states: Tensor,  # [batch, channels, sequence]
    dt: Tensor,  # time step, [batch, channels, sequence]
    A: Tensor,  # [channels, states]
    B: Tensor,  # [batch, states, sequence]
    C: Tensor,  # [batch, states, sequence]
    D: Tensor | None = None,  # skip connection, [channels]
    z: Tensor | None = None,  # gate, [batch, channels, sequence]
    delta_bias: Tensor | None = None,  # bias of the time step, [channels]
    delta_softplus: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """transformers' `mamba_selective_scan` as one node.

    Returns the output `[batch, channels, sequence]` and the state `[batch, channels, states]`, both float32.
    """
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = F.softplus(dt) if delta_softplus else dt
    past = RecordedStates.last_read
    assert past is not None
    inputs = [hidden_states, dt, A, B.transpose(1, 2), C.transpose(1, 2), past]
    output, state = call("SelectiveScan", inputs, [hidden_states.shape, past.shape])
    output = output.to(hidden_states.dtype)
    output = output if D is None else output + hidden_states * D[None, :, None]
    return (output if z is None else output * F.silu(z)), state


def _scan_states(config: Any) -> tuple[CacheState, ...]:
    channels = int(first(config, "mamba_expand", "expand") * config.hidden_size)
    window = CacheState(CONVOLUTION, (channels, first(config, "mamba_d_conv", "conv_kernel")))
    return (window, CacheState(RECURRENT, (channels, first(config, "mamba_d_state", "state_size"))))


SELECTIVE_SCAN_KIND = CacheKind(
    _scan_states, {**CONVOLVE, "mamba_selective_scan": selective_scan}, {"SelectiveScan": SELECTIVE_SCAN_FUNCTION}
)


STATE_SPACE_FUNCTION = (
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
    hidden_states: Tensor,  # [batch, sequence, heads, head_dim]
    dt: Tensor,  # time step, [batch, sequence, heads]
    A: Tensor,  # [heads]
    B: Tensor,  # [batch, sequence, groups, states]
    C: Tensor,  # [batch, sequence, groups, states]
    D: Tensor | None = None,  # skip connection, [heads]
    dt_bias: Tensor | None = None,  # bias of the time step, [heads]
    initial_states: Tensor | None = None,  # [batch, heads, head_dim, states]
    dt_softplus: bool = False,
    # limits of the time step; transformers ignores them in a single step after a past
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """transformers' `mamba2_chunk_scan` as one node.

    Returns the output, with the shape of `hidden_states`, and the state, with the shape of `initial_states`, both
    float32.
    """
    assert initial_states is not None
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    if tuple(dt_limit) != (0.0, float("inf")):
        assert TracedCache.is_step is not None  # whether this is a call with one token after a past
        dt = torch.where(TracedCache.is_step, dt, dt.clamp(*dt_limit))
    inputs = [hidden_states, dt, A, B, C, initial_states]
    output, state = call("StateSpace", inputs, [hidden_states.shape, initial_states.shape])
    return (output if D is None else output + hidden_states.float() * D[..., None]), state


def _space_states(config: Any) -> tuple[CacheState, ...]:
    heads = first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    size = first(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    states = first(config, "mamba_d_state", "ssm_state_size", "state_size")
    groups = first(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    window = (heads * size + 2 * groups * states, first(config, "mamba_d_conv", "conv_kernel"))
    return CacheState(CONVOLUTION, window), CacheState(RECURRENT, (heads, size, states))


STATE_SPACE_KIND = CacheKind(
    _space_states, {**CONVOLVE, "mamba2_chunk_scan": chunk_scan}, {"StateSpace": STATE_SPACE_FUNCTION}
)
