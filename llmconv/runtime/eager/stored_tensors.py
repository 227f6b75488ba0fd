"""StoredTensor: a tensor of a safetensors file as transformers loads it, read when it is sliced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from llmconv.checkpoint import open_weights
from llmconv.files.safetensors_file import FileTensor
from llmconv.runtime.eager.scale_factors import Factors

ALIGNMENT = 64
"""Bytes of a cache line; sums of products depend on where in it a matrix begins."""


WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""Integers of the size of a float, which torch takes from numpy whatever the float."""


class StoredTensor:
    """A tensor of a safetensors file, read when it is sliced.

    Args:
        stored: the slice of `safe_open`.
        file: where it lies; a tensor that is used as it is stored begins at the same place of a cache line as if the
            file were mapped, which is what `from_pretrained` does.
        dtype: that a load asks for.
        factor: a power of two that every value is multiplied by.
    """

    def __init__(self, stored: Any, file: FileTensor, dtype: torch.dtype, factor: float = 1.0) -> None:
        self._stored, self._file, self._dtype, self._factor = stored, file, dtype, factor
        self.shape = file.shape

    def __getitem__(self, key: Any) -> torch.Tensor:
        """All of it, which is what transformers asks for."""
        tensor: torch.Tensor = self._stored[key]
        if tensor.dtype is torch.float64:
            return self._scaled(tensor.float())  # as a load in float32 has it
        if self._factor != 1.0:
            return self._scaled(tensor)
        return _placed(tensor, self._file.offset) if tensor.dtype is self._dtype else tensor

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Some rows; a slice of `safe_open` would read the whole tensor for them."""
        words = torch.from_numpy(self._file.rows(start, stop).view(WORDS[self._file.dtype.itemsize]))
        return self._scaled(words.view(getattr(torch, self._file.dtype.name)))

    def _scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """In float32 at least, where a factor loses nothing that matters."""
        if self._factor == 1.0 or not tensor.is_floating_point():
            return tensor
        return torch.mul(tensor.to(torch.promote_types(tensor.dtype, torch.float32)), self._factor)


def stored_tensors(folder: Path, dtype: torch.dtype, factors: Factors | None = None) -> dict[str, StoredTensor]:
    """Every tensor of a folder's weights by name, scaled by `factors`; `dtype` is what a load asks for."""
    found = {name: tensor for name, tensor in open_weights(folder).items() if isinstance(tensor, FileTensor)}
    files = {tensor.path for tensor in found.values()}
    opened: dict[Path, Any] = {path: safe_open(path, "pt", device="cpu", backend="pread") for path in files}
    return {
        name: StoredTensor(opened[t.path].get_slice(name), t, dtype, factors(name, t.shape) if factors else 1.0)
        for name, t in found.items()
    }


def _placed(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same at an address that has the remainder of `offset` within a cache line."""
    if (tensor.data_ptr() - offset) % ALIGNMENT == 0:
        return tensor
    room = torch.empty(tensor.nbytes + 2 * ALIGNMENT, dtype=torch.uint8)
    start = (offset - room.data_ptr()) % ALIGNMENT
    if start % tensor.itemsize:
        return tensor
    return room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
