"""Mamba: a layer keeps the window of its convolution and one state per channel.

transformers' scan of several tokens starts from zeros even with a cache; the graph continues the state.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from llmconv.export.caches.convolution import CONVOLVE
from llmconv.export.caches.kind import CacheKind, CacheState, first
from llmconv.export.caches.scan_functions import call
from llmconv.export.caches.traced_layers import RecordedStates
from llmconv.runtime.cache_names import CONVOLUTION, RECURRENT

FUNCTION = """
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

    Returns the output `[batch, channels, sequence]` and the state `[batch, channels, states]`, both float32.

    Args:
        hidden_states: `[batch, channels, sequence]`.
        dt: time step, `[batch, channels, sequence]`.
        A: `[channels, states]`.
        B: `[batch, states, sequence]`.
        C: `[batch, states, sequence]`.
        D: skip connection, `[channels]`, or None.
        z: gate, `[batch, channels, sequence]`, or None.
        delta_bias: bias of the time step, `[channels]`, or None.
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


def _states(config: Any) -> tuple[CacheState, ...]:
    channels = int(first(config, "mamba_expand", "expand") * config.hidden_size)
    window = CacheState(CONVOLUTION, (channels, first(config, "mamba_d_conv", "conv_kernel")))
    return (window, CacheState(RECURRENT, (channels, first(config, "mamba_d_state", "state_size"))))


KIND = CacheKind(_states, {**CONVOLVE, "mamba_selective_scan": selective_scan}, {"SelectiveScan": FUNCTION})
