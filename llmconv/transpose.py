"""Transposed weights: which ones transformers stores in×out, and a view of a matrix that streams panels of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np

from llmconv.files.safetensors_file import FileTensor
from llmconv.files.source_file import fill, open_data
from llmconv.tensors import BLOCK_BYTES, Array, LazyTensor

# eight blocks of the writer: wide enough that the pieces of rows are long reads, small enough to be held
PANEL_BYTES = 32 << 20
TILE_ROWS = 256
PADDING_BYTES = 64
"""Tiles, and rows that are not a power of two apart, keep columns out of each other's cache lines: 8 times as fast."""


def transposed(tensor: LazyTensor) -> LazyTensor:
    """The transpose of a matrix, else ValueError; a second read within one panel comes from memory."""
    if len(tensor.shape) != 2:
        raise ValueError(f"only matrices are transposed, not shape {tensor.shape}")
    return LazyTensor(tensor.dtype, tensor.shape[::-1], _Panels(tensor).rows)


@dataclass(frozen=True, eq=False)
class _Panels:
    """The columns of `tensor`, by panels of equal width."""

    tensor: LazyTensor
    lock: Lock = field(default_factory=Lock)

    @property
    def width(self) -> int:
        """Columns in a panel."""
        return max(1, PANEL_BYTES // max(1, self.tensor.shape[0] * self.tensor.dtype.itemsize))

    def rows(self, start: int, stop: int) -> Array:
        """Columns `start:stop` as rows, C-contiguous."""
        parts = [self._part(number, start, stop) for number in range(start // self.width, -(-stop // self.width))]
        if not parts:
            return np.empty((0, self.tensor.shape[0]), self.tensor.dtype.numpy)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _part(self, number: int, start: int, stop: int) -> Array:
        with self.lock:  # threads ask for neighboring blocks: one reads the panel, the others wait for it
            panel = _panel(self, number)
        first = number * self.width
        # the transpose of `block`, written in tiles
        block = panel[:, max(start - first, 0) : stop - first]
        turned = np.empty(block.shape[::-1], block.dtype)
        for row in range(0, block.shape[0], TILE_ROWS):
            turned[:, row : row + TILE_ROWS] = block[row : row + TILE_ROWS].T
        return turned


@lru_cache(maxsize=2)
def _panel(panels: _Panels, number: int) -> Array:
    """One panel; the last two of all tensors are kept."""
    first = number * panels.width
    return _columns(panels.tensor, first, min(first + panels.width, panels.tensor.shape[1]))


def _columns(tensor: LazyTensor, first: int, last: int) -> Array:
    """Columns `first:last`, each row followed by some unused bytes."""
    size = tensor.dtype.itemsize
    panel = np.empty((tensor.shape[0], last - first + PADDING_BYTES // size), tensor.dtype.numpy)[:, : last - first]
    if isinstance(tensor, FileTensor) and last - first < tensor.shape[1]:
        _read_columns(tensor, first, panel)
    else:
        for start, stop in tensor.blocks(BLOCK_BYTES):
            panel[start:stop] = tensor.rows(start, stop)[:, first:last]
    return panel


def _read_columns(tensor: FileTensor, first: int, panel: Array) -> None:
    """Fills `panel` with columns of a matrix in a file, one read per row."""
    size = tensor.dtype.itemsize
    raw = panel.view(np.uint8)
    if tensor.record:
        tensor.record.was_touched()
    with open_data(tensor.path) as file:
        for row in range(tensor.shape[0]):
            place = tensor.offset + (row * tensor.shape[1] + first) * size
            fill(file, raw[row].data, place, tensor.path)


MODULES = ("c_attn", "c_proj", "c_fc", "q_attn")
TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


def is_conv1d(config: Mapping[str, Any], weight: str) -> bool:
    """Whether the weight of this name, such as `h.0.attn.c_attn.weight`, is that of a `Conv1D`."""
    return config.get("model_type") in TYPES and weight.split(".")[-2:-1] in [[module] for module in MODULES]
