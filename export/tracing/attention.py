"""Attention as one ONNX `Attention` node (opset 23), through transformers' `AttentionInterface`.

Families that do not use that interface trace with their own attention code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from llmconv.export.graph_spec import GROWING

ATTENTION = "llmconv"


def onnx_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """One ONNX `Attention` node; grouped-query attention needs no repeated keys there.

    Args:
        module: the calling attention layer.
        query: `[batch, heads, sequence, head_dim]`.
        key: `[batch, kv_heads, total, head_dim]`, past included; `value` likewise.
        attention_mask: additive, `[batch, 1, sequence, total]`.
        s_aux: attention sinks, one logit per head `[heads]`: what a query may attend to instead of any key.
    """
    if s_aux is not None:
        key, value, attention_mask = _with_sink(query, key, value, attention_mask, s_aux)
    attributes: dict[str, Any] = {"scale": float(query.shape[-1] ** -0.5 if scaling is None else scaling)}
    if softcap:
        attributes["softcap"] = float(softcap)
    (output,) = torch.onnx.ops.symbolic_multi_out(
        "::Attention",
        [query, key, value, attention_mask],
        attributes,
        dtypes=[query.dtype],
        shapes=[(*query.shape[:-1], value.shape[-1])],
        version=GROWING.opset,
    )
    return output.transpose(1, 2), None


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, s_aux: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One more key of zeros whose mask is the sink's logit: its score is that logit, and its value adds nothing."""
    key = torch.cat([key, torch.zeros_like(key[:, :, :1])], dim=-2)
    value = torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=-2)
    batch, heads, length, _ = query.shape
    sink = s_aux.reshape(1, -1, 1, 1).expand(batch, -1, length, 1)
    return key, value, torch.cat([attention_mask.expand(batch, heads, length, -1), sink], dim=-1)


def additive_mask(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **unused: Any,
) -> Tensor:
    """The mask of eager attention: 0 where a key is seen, the dtype's minimum elsewhere.

    A row that sees nothing (left padding) then attends evenly, as eager attention does, and never becomes NaN.

    Returns:
        `[batch or 1, 1, q_length, kv_length]`.
    """
    by_row = isinstance(q_offset, Tensor)  # rows of a static cache stand at different lengths
    queries = torch.arange(q_length) + (q_offset[:, None] if isinstance(q_offset, Tensor) else q_offset)
    queries = (queries if by_row else queries[None])[:, None, :, None]
    keys = (torch.arange(kv_length) + kv_offset)[None, None, None, :]
    rows = head = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    if attention_mask is not None:  # chunks begin behind the padding of each row
        rows = torch.arange(attention_mask.shape[0])[:, None, None, None]
    seen = mask_function(rows, head, queries, keys)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, :]
    return torch.where(seen, 0.0, torch.finfo(dtype).min)


AttentionInterface.register(ATTENTION, onnx_attention)
AttentionMaskInterface.register(ATTENTION, additive_mask)
