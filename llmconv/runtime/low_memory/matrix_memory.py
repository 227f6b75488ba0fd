"""MatrixMemory: the memory of matrices that are read as they are stored."""

from __future__ import annotations

from collections import defaultdict

import torch

from llmconv.runtime.eager.stored_tensors import StoredTensor

Key = tuple[torch.dtype, tuple[int, ...]]


class MatrixMemory:
    """Keeps the first matrices that are read, and reads all others into memory that is used again.

    Several runners of the same weights share one: a matrix is then in memory once.

    Args:
        kept: maximum number of bytes of matrices that are kept.
    """

    def __init__(self, kept: int = 0) -> None:
        self._room, self._kept = kept, dict[str, torch.Tensor]()
        self._buffers: dict[Key, list[torch.Tensor]] = defaultdict(list)
        self._used: dict[Key, int] = defaultdict(int)

    def begin(self) -> None:
        """Reads the matrices of another layer from now on: those of the one before are overwritten."""
        self._used.clear()

    def read(self, name: str, stored: StoredTensor, *, stays: bool = False) -> torch.Tensor:
        """A matrix.

        Args:
            name: of the stored tensor.
            stored: where it is.
            stays: it belongs to no layer, and is kept whatever the limit.
        """
        if name in self._kept:
            return self._kept[name]
        size = stored.read_bytes
        if size > self._room and not stays:
            return stored.fill(self._buffer(stored))
        self._room -= size
        self._kept[name] = stored.fill(stored.empty())
        return self._kept[name]

    def release(self) -> None:
        """Frees all of it."""
        self._room += sum(matrix.nbytes for matrix in self._kept.values())
        self._kept.clear()
        self._buffers.clear()

    def _buffer(self, stored: StoredTensor) -> torch.Tensor:
        """The next buffer of that dtype and shape that this layer has not used."""
        key = stored.dtype, stored.shape
        if self._used[key] == len(self._buffers[key]):
            self._buffers[key].append(stored.empty())
        self._used[key] += 1
        return self._buffers[key][self._used[key] - 1]
