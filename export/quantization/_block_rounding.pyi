"""The compiled search and rounding of block_rounding.c."""

from typing import Any

from numpy.typing import NDArray

def scales(
    weights: NDArray[Any],
    importance: NDArray[Any],
    scales: NDArray[Any],
    zeros: NDArray[Any],
    size: int,
    bits: int,
    symmetric: bool,
    search: bool,
    /,
) -> None:
    """Chooses scales and zero points; the interpreter lock is free meanwhile.

    Args:
        weights: float32 [blocks, size], C-contiguous like all arrays.
        importance: float32 of the columns, repeated for every row; empty for 1.
        scales: gets float32 [blocks].
        zeros: gets uint8 [blocks].
        size: elements of a block, at most 256.
        bits: of a code, 4 or 8.
        symmetric: the zero point is the middle code.
        search: least squared error instead of extreme values.

    Raises:
        ValueError: mismatched sizes.
    """

def codes(
    weights: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any], codes: NDArray[Any], size: int, bits: int, /
) -> None:
    """Rounds weights to packed codes; the interpreter lock is free meanwhile.

    Args:
        weights: float32 [blocks, size], C-contiguous like all arrays.
        scales: float32 [blocks].
        zeros: uint8 [blocks].
        codes: gets uint8 [blocks, size * bits / 8].
        size: elements of a block, at most 256.
        bits: of a code, 4 or 8.

    Raises:
        ValueError: mismatched sizes.
    """
