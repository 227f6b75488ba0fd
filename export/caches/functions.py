"""Scans as ONNX functions of standard operators: a graph calls `llmconv.scan.StateSpace` once per layer and defines it once.

They take any number of tokens and continue a given state, so one graph serves prompts, later turns and single steps.
A runtime expands them when it loads the graph. `L` is the number of tokens, `c` the tokens of one chunk, at most 64 and
never more than `L`, so that a step pays for one token only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx import parser
from torch import Tensor

DOMAIN = "llmconv.scan"
HEADER = f'<domain: "{DOMAIN}", opset_import: ["" : 23]>'

SELECTIVE_SCAN = """
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
"""Mamba's selective scan, one token after another: each channel d has n states of its own, so nothing can be chunked.

    state = exp(dt A) state + dt x B      y = state C

x, dt, y [b, d, L]; A [d, n]; B, C [b, L, n]; past, present [b, d, n]. arXiv:2312.00752, equation 2.
"""

CHUNKS = """
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    most = Constant <value_ints = [64]> ()
    length = Shape <start = 1, end = 2> (x)
    chunk = Min (length, most)
    short = Sub (length, one)
    filled = Div (short, chunk)
    chunks = Add (filled, one)
    padded = Mul (chunks, chunk)
    missing = Sub (padded, length)
    pads = Concat <axis = 0> (zero, missing)
    axis = Constant <value_ints = [1]> ()
    zero_scalar = Constant <value_int = 0> ()
    one_scalar = Constant <value_int = 1> ()
    chunk_scalar = Squeeze (chunk)
    steps = Range (zero_scalar, chunk_scalar, one_scalar)
    rows = Unsqueeze (steps, last)
    columns = Unsqueeze (steps, zero)
    after = Greater (rows, columns)
    seen = GreaterOrEqual (rows, columns)
    nothing = Constant <value_float = 0.0> ()
    never = Constant <value = float {-inf}> ()
"""
"""Cuts L tokens into equal chunks: `pads` fills axis 1 up, `seen` and `after` are the causal masks of a chunk."""

STATE_SPACE = (
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
"""The state space dual of Mamba-2: inside a chunk it is attention with decays, between chunks a recurrence.

    state = exp(dt A) state + dt x Bᵀ      y = state C      for each head

x, y [b, L, h, p]; dt [b, L, h]; A [h]; B, C [b, L, g, n], each for h / g heads; past, present [b, h, p, n].
arXiv:2405.21060, section 6. Decays are summed between their two ends, never subtracted, so none cancels.
"""


DELTA_RULE = (
    """
DeltaRule (x, q, k, decay, beta, past) => (y, present)
{"""
    + CHUNKS
    + """
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
    g_shape = Concat <axis = 0> (batch, chunks, chunk, heads, last)
    v_chunks = Reshape (v_padded, v_shape)
    q_chunks = Reshape (q_padded, k_shape)
    k_chunks = Reshape (k_padded, k_shape)
    g_chunks = Reshape (decay_padded, g_shape)
    beta_chunks = Reshape (beta_padded, g_shape)
    v_c = Transpose <perm = [1, 0, 3, 2, 4]> (v_chunks)
    q_c = Transpose <perm = [1, 0, 3, 2, 4]> (q_chunks)
    k_c = Transpose <perm = [1, 0, 3, 2, 4]> (k_chunks)
    k_t = Transpose <perm = [1, 0, 3, 4, 2]> (k_chunks)
    g_c = Transpose <perm = [1, 0, 3, 2, 4]> (g_chunks)
    beta_c = Transpose <perm = [1, 0, 3, 2, 4]> (beta_chunks)

    g_after = Where (after, g_c, nothing)
    row_axis = Constant <value_int = -2> ()
    sums = CumSum (g_after, row_axis)
    between = Where (seen, sums, never)
    decays = Exp (between)
    from_start = CumSum (g_c, row_axis)
    start_decay = Exp (from_start)

    k_beta = Mul (k_c, beta_c)
    v_beta = Mul (v_c, beta_c)
    overlap = MatMul (k_beta, k_t)
    decayed_overlap = Mul (overlap, decays)
    system = Where (after, decayed_overlap, nothing)
    diagonal = Equal (rows, columns)
    unit = Cast <to = 1> (diagonal)
    none = Mul (system, nothing)
    identity = Add (none, unit)
"""
    + "".join(
        f"""
    size_{m} = Constant <value_int = {m}> ()
    row_block_{m} = Div (rows, size_{m})
    column_block_{m} = Div (columns, size_{m})
    next_{m} = Add (column_block_{m}, one_scalar)
    neighbours_{m} = Equal (row_block_{m}, next_{m})
    parity_{m} = Mod (row_block_{m}, two)
    odd_{m} = Cast <to = 9> (parity_{m})
    pair_{m} = And (neighbours_{m}, odd_{m})
    corner_{m} = Where (pair_{m}, system, nothing)
    right_{m} = MatMul (corner_{m}, {inverse})
    left_{m} = MatMul ({inverse}, right_{m})
    inverse_{m} = Sub ({inverse}, left_{m})
"""
        for m, inverse in zip(
            (1, 2, 4, 8, 16, 32),
            ("identity", "inverse_1", "inverse_2", "inverse_4", "inverse_8", "inverse_16"),
            strict=True,
        )
    )
    + """
    k_start = Mul (k_beta, start_decay)
    new_values = MatMul (inverse_32, v_beta)
    k_reading = MatMul (inverse_32, k_start)
    attention = MatMul (q_c, k_t)
    weights = Mul (attention, decays)
    q_start = Mul (q_c, start_decay)
    last_row = Constant <value_int = -1> ()
    row_axes = Constant <value_ints = [-2]> ()
    end_of_axis = Constant <value_ints = [9223372036854775807]> ()
    end_decay = Gather <axis = -2> (decays, last_row)
    end_row = Unsqueeze (end_decay, row_axes)
    k_end = Mul (k_t, end_row)
    factor = Slice (start_decay, last, end_of_axis, row_axes)

    present, y_c = Scan <
        num_scan_inputs = 6,
        body = chunk_step (
            float[b, h, kd, vd] state, float[b, h, c, vd] values_z, float[b, h, c, kd] reading_z,
            float[b, h, c, kd] query_z, float[b, h, c, c] weights_z, float[b, h, kd, c] keys_z, float[b, h, u, w] factor_z
        ) => (float[b, h, kd, vd] next, float[b, h, c, vd] y_z)
        {
            known = MatMul (reading_z, state)
            change = Sub (values_z, known)
            outside = MatMul (query_z, state)
            inside = MatMul (weights_z, change)
            y_z = Add (outside, inside)
            kept = Mul (state, factor_z)
            written = MatMul (keys_z, change)
            next = Add (kept, written)
        }
    > (past, new_values, k_reading, q_start, weights, k_end, factor)
    by_token = Transpose <perm = [1, 0, 3, 2, 4]> (y_c)
    flat_shape = Concat <axis = 0> (batch, padded, heads, v_size)
    flat = Reshape (by_token, flat_shape)
    y = Slice (flat, zero, length, axis)
}
"""
)
FUNCTIONS = {"SelectiveScan": SELECTIVE_SCAN, "StateSpace": STATE_SPACE, "DeltaRule": DELTA_RULE}


def call(name: str, inputs: Sequence[Tensor], shapes: Sequence[Sequence[Any]]) -> tuple[Tensor, ...]:
    """A call of a function in a trace, with results of these shapes and of the first input's dtype."""
    dtypes = [inputs[0].dtype] * len(shapes)
    return tuple(
        torch.onnx.ops.symbolic_multi_out(f"{DOMAIN}::{name}", inputs, dtypes=dtypes, shapes=shapes, version=1)
    )


def define_functions(model: ir.Model) -> None:
    """Adds the definition of every function of this domain that the graph calls."""
    called = sorted({node.op_type for node in model.graph if node.domain == DOMAIN} & FUNCTIONS.keys())
    for name in called:
        function = ir.from_proto(function_proto(name))
        model.functions[function.identifier()] = function
    if called:
        model.opset_imports[DOMAIN] = 1


def function_proto(name: str) -> onnx.FunctionProto:
    """The function `name`, as an ONNX message."""
    return parser.parse_function(HEADER + FUNCTIONS[name])
