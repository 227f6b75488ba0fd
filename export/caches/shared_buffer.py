"""A cache in buffers of fixed length: new keys and values are written into the buffers, without concatenation.

`TensorScatter` (opset 24) allows a runtime to write into the memory of the past. Attention reads all slots of a static
cache, of which the mask hides the unfilled ones, and only the filled slots of a shared buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class BufferLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's cache over given buffers `[batch, kv_heads, slots, head_dim]`.

    Args:
        write_indices: first slot of the new tokens, int64 `[batch]`.
        filled: number of tokens before the new ones: a length, or `write_indices` if rows have different lengths.
        readable: number of slots that attention reads.
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
        """Number of tokens before the new ones."""
        return self._filled

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        """Number of keys that attention reads, and the index of the first."""
        return self._readable, 0


class TracedBuffers(Cache):  # type: ignore[misc]
    """The buffers of all layers."""

    def __init__(self, layers: Sequence[BufferLayer]) -> None:
        super().__init__(layers=list(layers))

    def tensors(self) -> list[Tensor]:
        """The buffers with the new tokens, in the order of the graph's outputs."""
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
    scattered: Tensor = torch.onnx.ops.symbolic(
        "::TensorScatter",
        [buffer, new, write_indices],
        {"axis": -2, "mode": "linear"},
        dtype=buffer.dtype,
        shape=buffer.shape,
        version=24,
    )
    return scattered
