"""Example arguments for a trace: fixed axes have their size, dynamic axes an example size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from llmconv.export.input_map import Port
from llmconv.runtime.cache_names import MAX_LENGTH
from llmconv.runtime.extra_inputs import BATCH, PAST, SEQUENCE, TOTAL
from llmconv.runtime.onnxruntime.embeddings import INPUTS_EMBEDS
from llmconv.runtime.onnxruntime.extra_feeds import is_token_input
from llmconv.runtime.onnxruntime.shared_buffers import WRITE_INDICES

EXAMPLE = {BATCH: 2, SEQUENCE: 3, PAST: 5, TOTAL: 8, MAX_LENGTH: 13}
"""Example sizes of dynamic axes; none is 0 or 1, for which torch.export would specialize the axis."""


def example_arguments(inputs: Sequence[Port]) -> tuple[Any, ...]:
    """Arguments of the traced module: one per token input, the extra inputs as one list and the cache as another."""
    tokens = {port.name: _ones(port) for port in inputs if is_tokens(port)}
    extras = [_zeros(port) for port in extra_ports(inputs)]
    cache = [_zeros(port) for port in inputs if is_cache(port)]
    return (*_arguments(tokens), extras, cache)


def _ones(port: Port) -> Tensor:
    return torch.ones(sizes(port), dtype=getattr(torch, port.dtype))


def extra_ports(inputs: Sequence[Port]) -> list[Port]:
    """The extra inputs, in the order of the graph."""
    return [port for port in inputs if not is_tokens(port) and not is_cache(port)]


def _zeros(port: Port) -> Tensor:
    """Zeros; a fixed shape is one number expanded, because the buffer may be larger than memory."""
    shape, dtype = sizes(port), getattr(torch, port.dtype)
    is_fixed = port.axes == tuple(shape)
    return torch.zeros(1, dtype=dtype).expand(shape) if is_fixed else torch.zeros(shape, dtype=dtype)


def dynamic_axes(inputs: Sequence[Port]) -> tuple[Any, ...]:
    """The dynamic axes of these arguments, in the same structure."""
    tokens = {port.name: axes(port) for port in inputs if is_tokens(port)}
    extras = [axes(port) for port in extra_ports(inputs)]
    return (*_arguments(tokens), extras, [axes(port) for port in inputs if is_cache(port)])


def _arguments(tokens: dict[str, Any]) -> list[Any]:
    """The values of the token inputs in the order of the module's arguments; None for missing inputs."""
    first = tokens.get("input_ids", tokens.get(INPUTS_EMBEDS))
    return [first, *(tokens.get(name) for name in ("attention_mask", "position_ids", WRITE_INDICES))]


def axes(port: Port) -> dict[int, Any]:
    """The dynamic axes of an input."""
    return {at: Dim.AUTO for at, axis in enumerate(port.axes) if isinstance(axis, str)}


def sizes(port: Port) -> list[int]:
    """The sizes of an input, with example sizes for its symbols."""
    return [axis if isinstance(axis, int) else EXAMPLE[axis] for axis in port.axes]


def is_tokens(port: Port) -> bool:
    """Whether an input has one value for each token, or where tokens are written."""
    return is_token_input(port.name, len(port.axes))


def is_cache(port: Port) -> bool:
    """Whether an input belongs to the cache."""
    return port.name.startswith("past_")
