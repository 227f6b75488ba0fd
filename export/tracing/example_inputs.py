"""What a model is traced with: arguments of the sizes that a form fixes, and numbers in the place of its symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from llmconv.export.input_maps import BATCH, PAST, SEQUENCE, TOTAL, Port
from llmconv.runtime.onnxruntime.shared_buffers import MAX_LENGTH, WRITE_INDICES

EXAMPLE = {BATCH: 2, SEQUENCE: 3, PAST: 5, TOTAL: 8, MAX_LENGTH: 13}
"""Sizes traced with; none is 0 or 1, because torch.export would specialise the axis."""


def example(inputs: Sequence[Port]) -> tuple[Any, ...]:
    """Arguments of the traced module: one per input, the cache as one list."""
    tokens = [torch.ones(sizes(port), dtype=getattr(torch, port.dtype)) for port in inputs if not is_cache(port)]
    cache = [_blank(port) for port in inputs if is_cache(port)]
    return (*_with_optional(inputs, tokens), cache)


def _blank(port: Port) -> Tensor:
    """Zeros; one number seen as a whole buffer where all sizes are fixed, which may be larger than memory."""
    shape = sizes(port)
    return torch.zeros(1).expand(shape) if port.axes == tuple(shape) else torch.zeros(shape)


def dynamic(inputs: Sequence[Port]) -> tuple[Any, ...]:
    """Which of their axes stay open, in the same shape."""
    symbols = [axes(port) for port in inputs]
    first = next(at for at, port in enumerate(inputs) if is_cache(port))
    return (*_with_optional(inputs, symbols[:first]), symbols[first:])


def _with_optional(inputs: Sequence[Port], given: Sequence[Any]) -> list[Any]:
    """What belongs to each token input in the order of the module's arguments; None for inputs that there are not."""
    by_name = {port.name: value for port, value in zip(inputs, given, strict=False)}
    names = ["attention_mask", "position_ids", WRITE_INDICES]
    return [given[0], *(by_name.get(name) for name in names)]


def axes(port: Port) -> dict[int, Any]:
    """The axes that stay open."""
    return {at: Dim.AUTO for at, axis in enumerate(port.axes) if isinstance(axis, str)}


def sizes(port: Port) -> list[int]:
    """The numbers that stand for the symbols."""
    return [axis if isinstance(axis, int) else EXAMPLE[axis] for axis in port.axes]


def is_cache(port: Port) -> bool:
    """Whether it is one of the cache's inputs."""
    return port.name.startswith("past_")
