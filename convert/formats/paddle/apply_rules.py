"""Applies the rows of a PaddleNLP family to the tensors of a checkpoint, over all layers and tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from llmconv.convert.algebra.operations import concat, listing
from llmconv.convert.algebra.transpose import transposed
from llmconv.convert.formats.paddle.names import DROPPED, TensorRule
from llmconv.errors import MalformedInput
from llmconv.tensors import LazyTensor


def place(
    rows: Sequence[TensorRule], ranks: Sequence[Mapping[str, LazyTensor]], layers: int, source: str
) -> dict[str, LazyTensor]:
    """Hugging Face name to tensor: embedding, layers by number, final norm, head.

    Args:
        rows: of the family.
        ranks: the tensors of each tensor-parallel rank, the same names in all.
        layers: how many there are.
        source: name of the file or folder, for error messages.

    Raises:
        MalformedInput: tensors are missing, left over, or of another shape than the configuration declares.
    """
    steps = unrolled(rows, min(layers, len(ranks[0])))
    used = {name for row in steps for name in row.sources}
    missing = [name for row in steps for name in row.sources if name not in ranks[0]]
    if missing:
        raise MalformedInput(
            f"`{source}` lacks {len(missing)} tensors of the model: {listing(missing)}",
            hint="a file of the checkpoint is missing, or its configuration belongs to another model",
        )
    unknown = [name for name in ranks[0] if name not in used and not DROPPED.search(name)]
    if unknown:
        raise MalformedInput(
            f"`{source}` holds {len(unknown)} tensors that no rule places: {listing(unknown)}",
            hint="the configuration belongs to another model, or the model has parts that this format does not know",
        )
    return {name: tensor for row in steps for name, tensor in converted(row, ranks, source).items()}


def unrolled(rows: Sequence[TensorRule], layers: int) -> list[TensorRule]:
    """The rows with the layers' numbers put in."""
    places = [place for place, row in enumerate(rows) if "{}" in row.sources[0]]
    first, last = places[0], places[-1] + 1
    steps = list(rows[:first])
    for layer in range(layers):
        steps += [numbered(row, layer) for row in rows[first:last]]
    return [*steps, *rows[last:]]


def numbered(row: TensorRule, layer: int) -> TensorRule:
    """The row of one layer."""
    sources, targets = (tuple(name.format(layer) for name in names) for names in (row.sources, row.targets))
    return replace(row, sources=sources, targets=targets)


def converted(row: TensorRule, ranks: Sequence[Mapping[str, LazyTensor]], source: str) -> dict[str, LazyTensor]:
    """The target tensors of one row, by name.

    Raises:
        MalformedInput: a source has another shape than the row, or the ranks' parts do not make it up.
    """
    outputs = 0 if row.linear else len(row.shape) - 1
    parts = [_oriented(row, _shards(row, name, ranks, source)) for name in row.sources]
    if row.pieces:
        found = [concat([_piece(row, shard, k, len(parts[0])) for shard in parts[0]], outputs) for k in _count(row)]
    else:
        across = 1 - (row.split or 0) if row.linear else (row.split or 0)
        found = [concat(shards, across) for shards in parts]
    if len(found) != len(row.targets):
        found = [concat(found, outputs)]
    return dict(zip(row.targets, found, strict=True))


def _count(row: TensorRule) -> range:
    return range(len(row.pieces))


def _shards(row: TensorRule, name: str, ranks: Sequence[Mapping[str, LazyTensor]], source: str) -> list[LazyTensor]:
    """The parts that ranks hold, or the whole from the first where each has all of it."""
    parts = [rank[name] for rank in ranks]
    shapes = {part.shape for part in parts}
    if shapes == {row.shape}:
        return parts[:1]
    size = row.shape[row.split] if row.split is not None else 0
    cut = tuple(size // len(parts) if axis == row.split else extent for axis, extent in enumerate(row.shape))
    if shapes != {cut} or size % len(parts) or len({part.dtype for part in parts}) != 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
        of_ranks = f" in {len(parts)} files" if len(parts) > 1 else ""
        raise MalformedInput(
            f"`{name}` of `{source}` has shape {shown}{of_ranks}, its configuration declares {list(row.shape)}",
            hint="the configuration belongs to another model, or a rank's file is missing or of another run",
        )
    return parts


def _oriented(row: TensorRule, parts: list[LazyTensor]) -> list[LazyTensor]:
    return [transposed(part) for part in parts] if row.linear else parts


def _piece(row: TensorRule, shard: LazyTensor, which: int, shards: int) -> LazyTensor:
    """Part `which` of every group of a fused tensor, of which `shard` is one of `shards` cuts."""
    single = row.groups == 1
    sizes = [size // shards if single else size for size in row.pieces]
    start, stride = sum(sizes[:which]), sum(sizes)
    groups = 1 if single else row.groups // shards
    ranges = [(group * stride + start, group * stride + start + sizes[which]) for group in range(groups)]
    return _rows(shard, ranges) if row.linear or len(row.shape) == 1 else _columns(shard, ranges)


def _rows(tensor: LazyTensor, ranges: Sequence[tuple[int, int]]) -> LazyTensor:
    return concat([_slice(tensor, start, stop) for start, stop in ranges], 0)


def _slice(tensor: LazyTensor, start: int, stop: int) -> LazyTensor:
    shape = (stop - start, *tensor.shape[1:])
    return LazyTensor(tensor.dtype, shape, lambda first, last: tensor.rows(start + first, start + last))


def _columns(tensor: LazyTensor, ranges: Sequence[tuple[int, int]]) -> LazyTensor:
    index = np.concatenate([np.arange(start, stop) for start, stop in ranges])
    shape = (tensor.shape[0], len(index))
    return LazyTensor(tensor.dtype, shape, lambda first, last: np.ascontiguousarray(tensor.rows(first, last)[:, index]))
