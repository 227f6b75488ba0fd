"""BlockFormat: how the rows of a matrix are stored as integer codes, in blocks with a scale and a zero point each."""

from __future__ import annotations

from dataclasses import dataclass

BITS = (4, 8)
SIZES = (16, 32, 64, 128, 256)
"""Block sizes of onnxruntime's CPU kernel (contrib_ops/cpu/quantization/matmul_nbits.cc)."""


@dataclass(frozen=True)
class BlockFormat:
    """The layout of `com.microsoft.MatMulNBits`: a weight is `(code - zero point) * scale`.

    Attributes:
        bits: of a code, 4 or 8.
        size: number of neighboring columns that share a scale; the last block of a row is padded with zeros.
        symmetric: the zero point is the middle code, and not stored.
        search: choose scale and zero point with the least squared error; otherwise from the extreme values alone.
    """

    bits: int = 4
    size: int = 32
    symmetric: bool = False
    search: bool = True

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of symmetric blocks."""
        return 1 << (self.bits - 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of a block."""
        return self.size * self.bits // 8

    def blocks(self, columns: int) -> int:
        """Number of blocks in a row."""
        return -(-columns // self.size)

    def zero_bytes(self, columns: int) -> int:
        """Bytes of the zero points of a row, packed like codes."""
        return -(-self.blocks(columns) * self.bits // 8)
