"""The gated delta rule (Qwen3-Next, OLMo hybrid; Kimi with a decay per channel): a window and a matrix per value head.

    state = exp(decay) state;  state = state + k beta (v - k state)ᵀ;  y = q state      for each head

Within a chunk, changes of tokens depend on each other through a unit triangular system (arXiv:2412.06464, section 3).
Its inverse is computed from blocks of 1, 2, 4, … tokens with two matrix products each. Every intermediate number is
part of the inverse itself, so there is no cancellation, unlike with powers of the system.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmconv.export.caches import CacheKind, CacheState
from llmconv.export.caches.state_space import CONVOLVE
from llmconv.export.caches.traced_layers import CHUNKS, call
from llmconv.runtime.extra_inputs import CONVOLUTION, RECURRENT

NORM_EPSILON = 1e-6  # epsilon of the norms of keys and queries; a constant of transformers' function, not in a config
CUT = """
    v_padded = Pad (x, pads, nothing, axis)
    q_padded = Pad (q, pads, nothing, axis)
    k_padded = Pad (k, pads, nothing, axis)
    decay_padded = Pad (decay, pads, nothing, axis)
    beta_padded = Pad (beta, pads, nothing, axis)
    v_sizes = Shape (x)
    k_sizes = Shape (k)
    two = Constant <value_ints = [2]> ()
    three = Constant <value_ints = [3]> ()
    batch = Slice (v_sizes, zero, one)
    heads = Slice (v_sizes, two, three)
    v_size = Slice (v_sizes, three, most)
    k_size = Slice (k_sizes, three, most)
    v_shape = Concat <axis = 0> (batch, chunks, chunk, heads, v_size)
    k_shape = Concat <axis = 0> (batch, chunks, chunk, heads, k_size)
    scalar_shape = Concat <axis = 0> (batch, chunks, chunk, heads, last)
    v_chunks = Reshape (v_padded, v_shape)
    q_chunks = Reshape (q_padded, k_shape)
    k_chunks = Reshape (k_padded, k_shape)
    g_chunks = Reshape (decay_padded, scalar_shape)
    beta_chunks = Reshape (beta_padded, scalar_shape)
    v_c = Transpose <perm = [1, 0, 3, 2, 4]> (v_chunks)
    q_c = Transpose <perm = [1, 0, 3, 2, 4]> (q_chunks)
    k_c = Transpose <perm = [1, 0, 3, 2, 4]> (k_chunks)
    g_c = Transpose <perm = [1, 0, 3, 2, 4]> (g_chunks)
    beta_c = Transpose <perm = [1, 0, 3, 2, 4]> (beta_chunks)
    k_beta = Mul (k_c, beta_c)
    v_beta = Mul (v_c, beta_c)
    row_axis = Constant <value_int = -2> ()
    row_axes = Constant <value_ints = [-2]> ()
    last_index = Constant <value_int = -1> ()
    from_start = CumSum (g_c, row_axis)
    start_decay = Exp (from_start)
    end_of_axis = Constant <value_ints = [9223372036854775807]> ()
    whole_decay = Slice (start_decay, last, end_of_axis, row_axes)
"""
"""Divides the inputs into chunks, [chunks, b, h, c, size]."""

DECAY_PER_HEAD = """
    g_after = Where (after, g_c, nothing)
    sums = CumSum (g_after, row_axis)
    between = Where (seen, sums, never)
    decays = Exp (between)
    k_t = Transpose <perm = [0, 1, 2, 4, 3]> (k_c)
    products = MatMul (k_beta, k_t)
    overlap = Mul (products, decays)
    attention = MatMul (q_c, k_t)
    weights = Mul (attention, decays)
    end_decay = Gather <axis = -2> (decays, last_index)
    end_row = Unsqueeze (end_decay, row_axes)
    k_end = Mul (k_t, end_row)
    factor = Identity (whole_decay)
"""

DECAY_PER_CHANNEL = """
    matrix_axes = Constant <value_ints = [-3]> ()
    matrix_axis = Constant <value_int = -3> ()
    after_channels = Unsqueeze (after, last)
    seen_channels = Unsqueeze (seen, last)
    g_rows = Unsqueeze (g_c, row_axes)
    g_after = Where (after_channels, g_rows, nothing)
    sums = CumSum (g_after, matrix_axis)
    between = Where (seen_channels, sums, never)
    decays = Exp (between)
    k_columns = Unsqueeze (k_c, matrix_axes)
    k_decayed = Mul (decays, k_columns)
    k_beta_column = Unsqueeze (k_beta, last)
    q_column = Unsqueeze (q_c, last)
    overlap_column = MatMul (k_decayed, k_beta_column)
    weights_column = MatMul (k_decayed, q_column)
    overlap = Squeeze (overlap_column, last)
    weights = Squeeze (weights_column, last)
    k_last = Gather <axis = -3> (k_decayed, last_index)
    k_end = Transpose <perm = [0, 1, 2, 4, 3]> (k_last)
    factor = Transpose <perm = [0, 1, 2, 4, 3]> (whole_decay)
"""

SYSTEM = """
    system = Where (after, overlap, nothing)
    diagonal = Equal (rows, columns)
    unit = Cast <to = 1> (diagonal)
    zeros = Mul (system, nothing)
    inverse_1 = Add (zeros, unit)
"""

DOUBLE = """
    size_{m} = Constant <value_int = {m}> ()
    row_block_{m} = Div (rows, size_{m})
    column_block_{m} = Div (columns, size_{m})
    next_{m} = Add (column_block_{m}, one_scalar)
    below_{m} = Equal (row_block_{m}, next_{m})
    parity_{m} = Mod (row_block_{m}, two)
    odd_{m} = Cast <to = 9> (parity_{m})
    pair_{m} = And (below_{m}, odd_{m})
    corner_{m} = Where (pair_{m}, system, nothing)
    right_{m} = MatMul (corner_{m}, inverse_{m})
    left_{m} = MatMul (inverse_{m}, right_{m})
    inverse_{n} = Sub (inverse_{m}, left_{m})
"""
"""Computes the inverses of diagonal blocks of n = 2 m tokens from those of m tokens."""

RECUR = """
    k_start = Mul (k_beta, start_decay)
    new_values = MatMul (inverse_{size}, v_beta)
    k_reading = MatMul (inverse_{size}, k_start)
    q_start = Mul (q_c, start_decay)
    present, y_c = Scan <
        num_scan_inputs = 6,
        body = chunk_step (
            float[b, h, kd, vd] state, float[b, h, c, vd] values_z, float[b, h, c, kd] reading_z,
            float[b, h, c, kd] query_z, float[b, h, c, c] weights_z, float[b, h, kd, c] keys_z,
            float[b, h, u, w] factor_z
        ) => (float[b, h, kd, vd] next, float[b, h, c, vd] y_z)
        {{
            known = MatMul (reading_z, state)
            change = Sub (values_z, known)
            outside = MatMul (query_z, state)
            inside = MatMul (weights_z, change)
            y_z = Add (outside, inside)
            kept = Mul (state, factor_z)
            written = MatMul (keys_z, change)
            next = Add (kept, written)
        }}
    > (past, new_values, k_reading, q_start, weights, k_end, factor)
    by_token = Transpose <perm = [1, 0, 3, 2, 4]> (y_c)
    flat_shape = Concat <axis = 0> (batch, padded, heads, v_size)
    flat = Reshape (by_token, flat_shape)
    y = Slice (flat, zero, length, axis)
"""


def _function(name: str, decays: str, size: int) -> str:
    """The definition of the function `name` with chunks of at most `size` tokens, a power of two."""
    cut = CHUNKS.replace("value_ints = [64]", f"value_ints = [{size}]") + CUT
    if decays == DECAY_PER_CHANNEL:
        cut = cut.replace("(decay_padded, scalar_shape)", "(decay_padded, k_shape)")
    blocks = [1 << power for power in range(size.bit_length() - 1)]
    inverse = SYSTEM + "".join(DOUBLE.format(m=m, n=2 * m) for m in blocks)
    return f"{name} (x, q, k, decay, beta, past) => (y, present)\n{{{cut}{decays}{inverse}{RECUR.format(size=size)}}}"


FUNCTION = _function("DeltaRule", DECAY_PER_HEAD, 64)
"""x, y [b, L, h, vd]; q, k [b, L, h, kd]; decay, beta [b, L, h]; past, present [b, h, kd, vd]."""

CHANNEL_FUNCTION = _function("ChannelDeltaRule", DECAY_PER_CHANNEL, 16)
"""The same with decay [b, L, h, kd]; chunks are short because there are kd decays between two tokens."""


def delta_rule(
    query: Tensor,  # [batch, sequence, key_heads, key_dim]
    key: Tensor,  # [batch, sequence, key_heads, key_dim]
    value: Tensor,  # [batch, sequence, heads, value_dim]
    g: Tensor,  # logarithm of the decay, [batch, sequence, heads], with or without a last axis `key_dim`
    beta: Tensor,  # [batch, sequence, heads]
    initial_state: Tensor | None = None,  # [batch, heads, key_dim, value_dim]
    use_qk_l2norm_in_kernel: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """transformers' `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention` as one node.

    Returns the output, with the shape of `value` and the dtype of `query`, and the new state, float32.
    """
    assert initial_state is not None
    dtype, query, key = query.dtype, query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    repeats = value.shape[2] // key.shape[2]
    if repeats > 1:
        query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    name = "DeltaRule" if g.ndim == beta.ndim else "ChannelDeltaRule"
    output, state = call(name, [value, query, key, g, beta, initial_state], [value.shape, initial_state.shape])
    return output.to(dtype), state


def _states(config: Any) -> tuple[CacheState, ...]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    matrix = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return CacheState(CONVOLUTION, (2 * keys + values, config.linear_conv_kernel_dim)), CacheState(RECURRENT, matrix)


def _channel_states(config: Any) -> tuple[CacheState, ...]:
    heads, size = config.linear_num_heads, config.linear_head_dim
    window = CacheState(CONVOLUTION, (3 * heads * size, config.linear_conv_kernel_dim))
    return window, CacheState(RECURRENT, (heads, size, size))


KIND = CacheKind(_states, {**CONVOLVE, "torch_chunk_gated_delta_rule": delta_rule}, {"DeltaRule": FUNCTION})
CHANNEL_KIND = CacheKind(
    _channel_states,
    {**CONVOLVE, "chunk_kimi_delta_attention": delta_rule},
    {"ChannelDeltaRule": CHANNEL_FUNCTION},
    # multi-head latent attention keeps the latents of keys and values, and the rotated part of the keys
    heads=lambda config: ((1, config.kv_lora_rank), (1, config.qk_rope_head_dim)),
)
