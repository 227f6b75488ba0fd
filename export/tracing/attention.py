"""Attention as one ONNX `Attention` node (opset 23), registered with transformers' `AttentionInterface`.

Families that do not use that interface are traced with their own attention code.

A cache in buffers of fixed length: new keys and values are written into the buffers, without concatenation.

`TensorScatter` (opset 24) allows a runtime to write into the memory of the past. Attention reads all slots of a static
cache, of which the mask hides the unfilled ones, and only the filled slots of a shared buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from llmconv.export.graph_spec import GROWING

ATTENTION = "llmconv"


def onnx_attention(
    module: nn.Module,
    query: Tensor,  # [batch, heads, sequence, head_dim]
    key: Tensor,  # [batch, kv_heads, total, head_dim], past included
    value: Tensor,  # [batch, kv_heads, total, value_dim], past included
    attention_mask: Tensor,  # additive, [batch, 1, sequence, total]
    scaling: float | None = None,  # factor of the scores (default: `head_dim ** -0.5`)
    softcap: float | None = None,  # limit of the scores
    # attention sinks, one logit per head [heads], which a query may attend to instead of any key
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """One ONNX `Attention` node; it supports grouped-query attention without repeated keys.

    Returns the output `[batch, sequence, heads, value_dim]`, and None for the weights.
    """
    if s_aux is not None:
        key, value, attention_mask = _with_sink(query, key, value, attention_mask, s_aux)
    attributes: dict[str, Any] = {"scale": float(query.shape[-1] ** -0.5 if scaling is None else scaling)}
    if softcap:
        attributes["softcap"] = float(softcap)
    if query.dtype != torch.float32:
        attributes["softmax_precision"] = int(ir.DataType.FLOAT)
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
    """Appends a key and value of zeros whose mask is the logit of the sink."""
    key = torch.cat([key, torch.zeros_like(key[:, :, :1])], dim=-2)
    value = torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=-2)
    batch, heads, length, _ = query.shape
    sink = s_aux.reshape(1, -1, 1, 1).expand(batch, -1, length, 1)
    return key, value, torch.cat([attention_mask.expand(batch, heads, length, -1), sink], dim=-1)


def additive_mask(
    q_length: int,  # number of new tokens
    kv_length: int,  # number of keys, past included
    q_offset: int | Tensor = 0,  # index of the first new token, or one index per row, int64 [batch]
    kv_offset: int = 0,  # index of the first key
    *,
    mask_function: Callable[..., Tensor],  # of row, head, query index and key index; returns visibility
    attention_mask: Tensor | None = None,  # [batch, kv_length], False for padding; None without padding
    dtype: torch.dtype = torch.float32,
    **unused: Any,
) -> Tensor:
    """The mask of eager attention `[batch or 1, 1, q_length, kv_length]`: 0 if visible, else the minimum of `dtype`.

    A row without visible keys (left padding) then attends evenly, like eager attention, and never becomes NaN.
    """
    by_row = isinstance(q_offset, Tensor)  # rows of a static cache have different lengths
    queries = torch.arange(q_length) + (q_offset[:, None] if isinstance(q_offset, Tensor) else q_offset)
    queries = (queries if by_row else queries[None])[:, None, :, None]
    keys = (torch.arange(kv_length) + kv_offset)[None, None, None, :]
    rows = head = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    if attention_mask is not None:  # chunks begin after the padding of each row
        rows = torch.arange(attention_mask.shape[0])[:, None, None, None]
    visible = mask_function(rows, head, queries, keys)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, :]
    return torch.where(visible, torch.zeros((), dtype=dtype), torch.full((), torch.finfo(dtype).min, dtype=dtype))


AttentionInterface.register(ATTENTION, onnx_attention)
AttentionMaskInterface.register(ATTENTION, additive_mask)


class BufferLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's cache over given buffers `[batch, kv_heads, slots, head_dim]`.

    `write_indices`: first slot of the new tokens, int64 `[batch]`. `filled`: number of tokens before the new ones: a
    length, or `write_indices` if rows have different lengths. `readable`: number of slots that attention reads.
    """

    def __init__(self, keys: Tensor, values: Tensor, write_indices: Tensor, filled: Any, readable: Any) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self._write_indices, self._filled, self._readable = write_indices, filled, readable

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes new keys and values `[batch, kv_heads, sequence, head_dim]`; returns what attention reads."""
        self.keys = _scatter(self.keys, key_states, self._write_indices)
        self.values = _scatter(self.values, value_states, self._write_indices)
        return self.keys[:, :, : self._readable], self.values[:, :, : self._readable]

    def get_seq_length(self) -> Any:
        return self._filled

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        """Number of keys that attention reads, and the index of the first."""
        return self._readable, 0


class TracedBuffers(Cache):  # type: ignore[misc]
    """The buffers of all layers."""

    def __init__(self, layers: Sequence[BufferLayer]) -> None:
        super().__init__(layers=list(layers))

    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]


def buffer_cache(
    past: Sequence[Tensor], input_ids: Tensor, attention_mask: Tensor, write_indices: Tensor | None
) -> TracedBuffers:
    """A cache over flat buffers, keys before values, layers in order.

    `attention_mask` is `[batch, total]`, for a static cache over every slot; `write_indices`, int64 `[batch]`, are the
    first slots of the new tokens of a static cache, None for a shared buffer, whose rows all continue at the end of the
    mask.
    """
    total = attention_mask.shape[1]
    filled: Any = write_indices
    if write_indices is None:
        filled = total - input_ids.shape[1]
        write_indices = torch.full_like(attention_mask[:, 0], filled)
    pairs = zip(past[::2], past[1::2], strict=True)
    return TracedBuffers([BufferLayer(keys, values, write_indices, filled, total) for keys, values in pairs])


def _scatter(buffer: Tensor, new: Tensor, write_indices: Tensor) -> Tensor:
    return torch.onnx.ops.symbolic(
        "::TensorScatter",
        [buffer, new, write_indices],
        {"axis": -2, "mode": "linear"},
        dtype=buffer.dtype,
        shape=buffer.shape,
        version=24,
    )
