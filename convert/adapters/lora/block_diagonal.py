"""BD-LoRA: expands factors of which only the blocks on the diagonal are stored."""

from __future__ import annotations

import numpy as np

from llmconv.convert.adapters.lora.config import BlockDiagonal
from llmconv.errors import MalformedInput
from llmconv.tensors import Array, LazyTensor


def is_blocked(parts: tuple[str, ...], module: str) -> bool:
    """Whether one of `parts` occurs in the last component of the module's path (PEFT `BdLoraLinearVariant.init`)."""
    return any(part in module.rpartition(".")[2] for part in parts)


def unblocked(factor: LazyTensor, count: int) -> LazyTensor:
    """The block-diagonal matrix of `count` blocks, which are stored stacked by rows (PEFT `BlockDiagonalLinear`).

    Args:
        factor: rows×(columns/count).
        count: number of blocks.

    Returns:
        rows×columns.

    Raises:
        MalformedInput: the number of rows is not a multiple of `count`.
    """
    rows, width = factor.shape
    if rows % count:
        raise MalformedInput(
            f"a factor of {rows} rows cannot have {count} blocks", hint="`nblocks` is of another adapter; copy it again"
        )
    height = rows // count

    def load(start: int, stop: int) -> Array:
        stored = factor.rows(start, stop)
        whole = np.zeros((stop - start, count * width), stored.dtype)
        for row in range(start, stop):
            first = row // height * width
            whole[row - start, first : first + width] = stored[row - start]
        return whole

    return LazyTensor(factor.dtype, (rows, count * width), load)


def dense(a: LazyTensor, b: LazyTensor, module: str, blocks: BlockDiagonal | None) -> tuple[LazyTensor, LazyTensor]:
    """A and B of a module, expanded where they are stored as blocks.

    Args:
        a: r×in, or its blocks.
        b: out×r, or its blocks.
        module: path of the module.
        blocks: `use_bdlora` of the config.
    """
    if blocks and len(a.shape) == len(b.shape) == 2:
        a = unblocked(a, blocks.count) if is_blocked(blocks.a, module) else a
        b = unblocked(b, blocks.count) if is_blocked(blocks.b, module) else b
    return a, b
