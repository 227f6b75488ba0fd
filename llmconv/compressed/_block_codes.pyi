"""The compiled rounding of block_codes.c."""

from typing import Any

from numpy.typing import NDArray

def peaks(words: memoryview, peaks: NDArray[Any], itemsize: int, columns: int, width: int, /) -> None:
    """Finds largest magnitudes; the interpreter lock is free meanwhile.

    Args:
        words: of bfloat16 or float32 [rows, columns], C-contiguous like all arrays.
        peaks: gets float32 [rows, groups]; infinite or NaN where a weight is.
        itemsize: bytes of a weight, 2 or 4.
        columns: of a row.
        width: columns of a group, of which the last may be partial.

    Raises:
        ValueError: mismatched sizes.
    """

def codes(
    words: memoryview, scales: NDArray[Any], codes: memoryview, itemsize: int, columns: int, width: int, kind: int, /
) -> None:
    """Rounds weights divided by their scales; the interpreter lock is free meanwhile.

    Args:
        words: of finite bfloat16 or float32 [rows, columns], C-contiguous like all arrays.
        scales: float32 [rows, groups], none 0.
        codes: gets uint8 [rows, columns], or pairs [rows, columns / 2] of e2m1.
        itemsize: bytes of a weight, 2 or 4.
        columns: of a row.
        width: columns of a group, of which the last may be partial.
        kind: 0 for e4m3, 1 for int8, 2 for e2m1.

    Raises:
        ValueError: mismatched sizes.
    """
