"""The compiled sum of low_rank_sum.c."""

from typing import Any

from numpy.typing import NDArray

def add(target: NDArray[Any], source: NDArray[Any], left: NDArray[Any], right: NDArray[Any], rank: int) -> bool:
    """target = source + left @ right, summed in float64, rounded once; the interpreter lock is free meanwhile.

    Args:
        target: uint16 (the bits of bfloat16) of rows×columns, C-contiguous like all four.
        source: as `target`.
        left: float64, rows×rank.
        right: float64, rank×columns.
        rank: at least 1.

    Returns:
        False if a sum is infinite, NaN or too large for bfloat16; `target` is then undefined.

    Raises:
        ValueError: mismatched sizes.
    """
