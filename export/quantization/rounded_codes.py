"""RoundedCodes: codes, scales and zero points that were chosen before the file is written, kept in a scratch file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmconv.export.quantization.block_format import BlockFormat
from llmconv.export.quantization.block_rounding import pack
from llmconv.export.quantization.quantized_tensor import CODES, SCALES, ZEROS
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor


@dataclass(frozen=True)
class RoundedCodes:
    """The codes of a weight [N, K], or of a stack [experts, N, K].

    `parts` are arrays by suffix, as in `QuantizedTensor.tensors`, mapped from the scratch file.
    """

    parts: dict[str, Array]
    scale_dtype: DType

    def put(self, index: int | None, form: BlockFormat, codes: Array, scales: Array, zeros: Array) -> None:
        """Stores codes uint8 [N, K] (K padded to whole blocks), scales float32 [N, blocks] and zeros uint8 [N, blocks].

        `index` is of the matrix in a stack; None for a weight that is one matrix.
        """
        made = {
            CODES: pack(codes.reshape(-1, form.size), form.bits).reshape(*scales.shape, form.block_bytes),
            SCALES: scales.astype(self.scale_dtype.numpy),
            ZEROS: pack(zeros, form.bits),
        }
        for suffix, array in self.parts.items():
            array[slice(None) if index is None else index] = made[suffix]

    def tensors(self, name: str) -> dict[str, LazyTensor]:
        """The tensors by name, as `QuantizedTensor.tensors`."""
        dtypes = {CODES: BY_NAME["uint8"], ZEROS: BY_NAME["uint8"], SCALES: self.scale_dtype}
        return {name + suffix: _lazy(dtypes[suffix], array) for suffix, array in self.parts.items()}


def _lazy(dtype: DType, array: Array) -> LazyTensor:
    return LazyTensor(dtype, array.shape, lambda start, stop: np.ascontiguousarray(array[start:stop]))


class Scratch:
    """An unnamed file, open for reading and writing, which the system removes with the process."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._end = file, 0

    @classmethod
    @contextmanager
    def beside(cls, output: Path) -> Iterator[Scratch]:
        """Context with a scratch file in the file system of a folder that may not exist yet."""
        home = next(folder for folder in output.absolute().parents if folder.is_dir())
        with tempfile.TemporaryFile(dir=home) as file:
            yield cls(file)

    def codes(self, outer: tuple[int, ...], columns: int, form: BlockFormat, scale_dtype: DType) -> RoundedCodes:
        """Room for the codes of a weight with K `columns` and the outer axes [N], or [experts, N]."""
        blocks, bytes_ = form.blocks(columns), np.dtype(np.uint8)
        parts = {CODES: self._array((*outer, blocks, form.block_bytes), bytes_)}
        if not form.symmetric:
            parts[ZEROS] = self._array((*outer, form.zero_bytes(columns)), bytes_)
        parts[SCALES] = self._array((*outer, blocks), scale_dtype.numpy)
        return RoundedCodes(parts, scale_dtype)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        start = -(-self._end // 8) * 8
        self._end = start + prod(shape) * dtype.itemsize
        self._file.truncate(self._end)
        return np.memmap(self._file, dtype, "r+", start, shape)
