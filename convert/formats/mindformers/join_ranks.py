"""The tensors of a model-parallel MindSpore run, joined from those of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from llmconv.convert.algebra.operations import concat
from llmconv.convert.formats.mindformers.mindspore.strategy import Strategy
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.tensors import LazyTensor


def merge_ranks(
    folder: Path, shards: Mapping[int, Mapping[str, LazyTensor]], strategy: Strategy
) -> dict[str, LazyTensor]:
    """Joins the tensors of all ranks; of equal copies, the one of the lowest rank is read.

    Args:
        folder: its name appears in error messages.
        shards: rank to its tensors by name.
        strategy: from `find_strategy`.

    Raises:
        UnsupportedInput: a tensor is divided unevenly or along more than two axes.
        MalformedInput: a tensor has no layout, a rank is missing, or parts contradict each other.
    """
    holders: dict[str, list[int]] = {}
    for rank, tensors in sorted(shards.items()):
        for name in tensors:
            holders.setdefault(name, []).append(rank)
    unknown = [name for name in holders if name not in strategy.layouts]
    if unknown:
        raise MalformedInput(
            f"the strategy `{strategy.path}` contains no layout for {len(unknown)} tensors of `{folder.name}`: "
            + listing(unknown),
            hint="give the strategy files of all stages of this run",
        )
    return {
        name: _merge(folder, name, {rank: shards[rank][name] for rank in ranks}, strategy, len(shards))
        for name, ranks in holders.items()
    }


def _merge(folder: Path, name: str, parts: Mapping[int, LazyTensor], strategy: Strategy, ranks: int) -> LazyTensor:
    """Joins one tensor from the ranks that hold it, maybe not all (`remove_redundancy` keeps one copy of each part)."""
    layout = strategy.layouts[name]
    if layout.uneven:
        raise _unsupported(folder, name, "unevenly or in nested parts")
    if ranks % layout.ranks:
        raise MalformedInput(
            f"`{folder.name}` has {ranks} ranks, but the strategy `{strategy.path}` divides `{name}` "
            f"among {layout.ranks}",
            hint="a rank folder is missing, or the strategy belongs to another run",
        )
    pieces = {layout.coordinates_of(rank % layout.ranks): parts[rank] for rank in sorted(parts, reverse=True)}
    if any(len(layout.axes) > len(part.shape) for part in pieces.values()) or len(pieces) != prod(layout.grid()):
        raise MalformedInput(
            f"`{folder.name}` holds {len(pieces)} of {prod(layout.grid())} parts of `{name}`, or it has other axes",
            hint=f"a rank folder is incomplete, or the strategy `{strategy.path}` belongs to another run",
        )
    return _assemble(folder, name, pieces, strategy)


def _unsupported(folder: Path, name: str, how: str) -> UnsupportedInput:
    return UnsupportedInput(
        f"`{name}` of `{folder.name}` is divided {how}, which is unsupported",
        hint="merge it first with MindSpore's `transform_checkpoints(src, dst, prefix, src_strategy, None)`",
    )


def _assemble(folder: Path, name: str, pieces: Mapping[tuple[int, ...], LazyTensor], strategy: Strategy) -> LazyTensor:
    grid = strategy.layouts[name].grid()
    if any(count > 1 for count in grid[2:]):
        raise _unsupported(folder, name, f"along {len(grid)} axes")
    rows, columns = (*grid[:2], 1, 1)[:2] if grid else (1, 1)
    rest = (0,) * max(0, len(grid) - 2)
    try:
        lines = [
            concat([pieces[(row, column, *rest)[: len(grid)]] for column in range(columns)], 1) for row in range(rows)
        ]
        return concat(lines, 0)
    except ValueError as error:
        raise MalformedInput(
            f"the parts of `{name}` in `{folder.name}` cannot be joined: {error}",
            hint=f"ranks of different runs are mixed, or the strategy `{strategy.path}` belongs to another run",
        ) from error
