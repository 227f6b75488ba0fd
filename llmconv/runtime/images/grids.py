"""Grids of tiles: which one an image of a size fills, and which part of it."""

from __future__ import annotations

from collections.abc import Sequence


def best_resolution(size: Sequence[int], grids: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The height and width of `grids` that keep most of an image, and then waste least; transformers' function.

    Args:
        size: of the image, height and width.
        grids: heights and widths.
    """

    def merit(grid: Sequence[int]) -> tuple[int, int]:
        scale = min(grid[1] / size[1], grid[0] / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return kept, kept - grid[0] * grid[1]

    height, width = max(grids, key=merit)
    return int(height), int(width)


def unpadded(grid: Sequence[int], size: Sequence[int]) -> tuple[slice, slice]:
    """The rows and columns of a grid that an image fills; transformers' `unpad_image`.

    Args:
        grid: rows and columns.
        size: of the image, height and width.
    """
    (rows, columns), (height, width) = grid, size
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(padding, rows - padding), slice(None)
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(None), slice(padding, columns - padding)
