"""Example arguments for a trace: fixed axes have their size, dynamic axes an example size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from llmconv.export.families import BATCH, PAST, SEQUENCE, TOTAL, Port
from llmconv.runtime.cache_names import MAX_LENGTH
from llmconv.runtime.onnxruntime.shared_buffers import WRITE_INDICES

EXAMPLE = {BATCH: 2, SEQUENCE: 3, PAST: 5, TOTAL: 8, MAX_LENGTH: 13}
"""Example sizes of dynamic axes; none is 0 or 1, for which torch.export would specialize the axis."""


def example_arguments(inputs: Sequence[Port]) -> tuple[Any, ...]:
    """Arguments of the traced module: one per input, and the cache as one list."""
    tokens = [torch.ones(sizes(port), dtype=getattr(torch, port.dtype)) for port in inputs if not is_cache(port)]
    cache = [_zeros(port) for port in inputs if is_cache(port)]
    return (*_with_optional(inputs, tokens), cache)


def _zeros(port: Port) -> Tensor:
    """Zeros; a fixed shape is one number expanded, because the buffer may be larger than memory."""
    shape, dtype = sizes(port), getattr(torch, port.dtype)
    is_fixed = port.axes == tuple(shape)
    return torch.zeros(1, dtype=dtype).expand(shape) if is_fixed else torch.zeros(shape, dtype=dtype)


def dynamic_axes(inputs: Sequence[Port]) -> tuple[Any, ...]:
    """The dynamic axes of these arguments, in the same structure."""
    symbols = [axes(port) for port in inputs]
    first = next((at for at, port in enumerate(inputs) if is_cache(port)), len(inputs))
    return (*_with_optional(inputs, symbols[:first]), symbols[first:])


def _with_optional(inputs: Sequence[Port], given: Sequence[Any]) -> list[Any]:
    """The values of the token inputs in the order of the module's arguments; None for missing inputs."""
    by_name = {port.name: value for port, value in zip(inputs, given, strict=False)}
    names = ["attention_mask", "position_ids", WRITE_INDICES]
    return [given[0], *(by_name.get(name) for name in names)]


def axes(port: Port) -> dict[int, Any]:
    """The dynamic axes of an input."""
    return {at: Dim.AUTO for at, axis in enumerate(port.axes) if isinstance(axis, str)}


def sizes(port: Port) -> list[int]:
    """The sizes of an input, with example sizes for its symbols."""
    return [axis if isinstance(axis, int) else EXAMPLE[axis] for axis in port.axes]


def is_cache(port: Port) -> bool:
    """Whether an input belongs to the cache."""
    return port.name.startswith("past_")
