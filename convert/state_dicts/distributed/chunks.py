"""Joins the chunks of a distributed tensor, in any grid, into one LazyTensor that reads only the chunks it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from llmconv.convert.state_dicts.distributed.metadata import Chunk
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import Array, DType, LazyTensor

CELL_LIMIT = 1 << 22
"""Maximum number of cells between all boundaries of all chunks; a regular grid has one per chunk."""


def is_tiled(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Whether the chunks cover a tensor of `shape` exactly, without gap or overlap.

    Boundaries are numbered along each dim, so that a chunk is a box of whole cells; each cell must be in one box.
    """
    boxes = [chunk for chunk in chunks if prod(chunk.sizes)]
    if not prod(shape) or not boxes:
        return not boxes and not prod(shape)
    if sum(prod(chunk.sizes) for chunk in boxes) != prod(shape):
        return False
    spans: list[list[tuple[int, int]]] = []
    counts: list[int] = []
    for dim, size in enumerate(shape):
        edges = [(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for chunk in boxes]
        number = {edge: index for index, edge in enumerate(sorted({edge for pair in edges for edge in pair}))}
        if max(number) > size:
            return False
        spans.append([(number[low], number[high]) for low, high in edges])
        counts.append(len(number) - 1)
    areas = [prod(span[index][1] - span[index][0] for span in spans) for index in range(len(boxes))]
    if prod(counts) > CELL_LIMIT or sum(areas) != prod(counts):
        return False
    cells = np.zeros(counts, dtype=bool)
    for index in range(len(boxes)):
        cells[tuple(slice(*span[index]) for span in spans)] = True
    return bool(cells.all())


def assemble(
    dtype: DType, shape: tuple[int, ...], chunks: Sequence[Chunk], opened: Callable[[Chunk], LazyTensor]
) -> LazyTensor:
    """One tensor from chunks that tile it.

    Args:
        dtype, shape: of the whole tensor.
        chunks: see `is_tiled`.
        opened: returns the tensor of a chunk, of `dtype` and the chunk's sizes; called only for chunks that are read.
    """
    boxes = [chunk for chunk in chunks if prod(chunk.sizes)]
    if not shape:
        return LazyTensor(dtype, shape, lambda start, stop: opened(boxes[0]).rows(start, stop))

    def load(start: int, stop: int) -> Array:
        needed = [box for box in boxes if box.offsets[0] < stop and box.offsets[0] + box.sizes[0] > start]
        if len(needed) == 1 and needed[0].sizes[1:] == shape[1:]:
            return opened(needed[0]).rows(start - needed[0].offsets[0], stop - needed[0].offsets[0])
        rows = np.empty((stop - start, *shape[1:]), dtype=dtype.numpy)
        for box in needed:
            low, high = max(start, box.offsets[0]), min(stop, box.offsets[0] + box.sizes[0])
            columns = (slice(at, at + size) for at, size in zip(box.offsets[1:], box.sizes[1:], strict=True))
            rows[(slice(low - start, high - start), *columns)] = opened(box).rows(
                low - box.offsets[0], high - box.offsets[0]
            )
        return rows

    return LazyTensor(dtype, shape, load)


def reshaped(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """`tensor` with another shape of as many elements; one that lies contiguously in a file is read row by row."""
    if isinstance(tensor, FileTensor):
        return FileTensor(tensor.path, tensor.offset, tensor.dtype, shape, tensor.record)
    return LazyTensor(
        tensor.dtype,
        shape,
        lambda start, stop: np.ascontiguousarray(tensor.read().reshape(shape or (1,))[start:stop]),
    )
