"""IntegerCodes: a quantized weight as integers with scales and zero points, whatever the layout of its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import Array, DType

MOST_BITS = 8
"""Of a code of onnxruntime's products."""
SIZES = (128, 64, 32, 16)
"""Blocks of onnxruntime's products; in larger ones activations would be rounded to int8 too coarsely."""


@dataclass(frozen=True)
class IntegerCodes:
    """value = (code - zero point of its group) * scale of its group.

    Attributes:
        shape: [N, K], or [experts, N, K]; columns of K share a scale in groups.
        bits: of a code.
        groups: int64 [K], the group of each column.
        codes: `codes(start, stop)` returns those of rows `start:stop` of the first axis, uint8 [rows, …, K].
        scales: `scales(start, stop)` returns theirs, [rows, …, groups], finite.
        zeros: `zeros()` returns all zero points, uint8 [N, groups]; None if all are the middle code.
        scale_dtype: element type of the scales.
        turned: the plain weight is [..., K, N].
        in_file: the tensors with the codes and scales if their bytes are these codes, the first in the low bits, and
            these scales.
    """

    shape: tuple[int, ...]
    bits: int
    groups: Array
    codes: Callable[[int, int], Array]
    scales: Callable[[int, int], Array]
    zeros: Callable[[], Array] | None
    scale_dtype: DType
    turned: bool = False
    in_file: tuple[FileTensor, FileTensor] | None = None

    @property
    def block_size(self) -> int | None:
        """The largest block that onnxruntime has a product for, with columns of one group each; None without one.

        Columns are sorted by group before they are cut into blocks.
        """
        groups = np.sort(self.groups)
        for size in SIZES:
            blocks = np.pad(groups, (0, -len(groups) % size), mode="edge").reshape(-1, size)
            if (blocks == blocks[:, :1]).all():
                return size
        return None

    @property
    def has_operator(self) -> bool:
        """Whether onnxruntime has a product for codes like these."""
        return self.bits <= MOST_BITS and self.block_size is not None
