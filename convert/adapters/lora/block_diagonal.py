"""BD-LoRA: a factor of which only the blocks on the diagonal are stored, made the whole matrix that it means."""

from __future__ import annotations

import numpy as np

from llmconv.convert.adapters.lora.config import BlockDiagonal
from llmconv.errors import MalformedInput
from llmconv.tensors import Array, LazyTensor


def is_blocked(parts: tuple[str, ...], module: str) -> bool:
    """Whether one of `parts` occurs in the last component of the module's path (PEFT `BdLoraLinearVariant.init`)."""
    return any(part in module.rpartition(".")[2] for part in parts)


def unblocked(factor: LazyTensor, count: int) -> LazyTensor:
    """The block-diagonal matrix of `count` blocks that are stored below each other (PEFT `BlockDiagonalLinear`).

    Args:
        factor: rows×(columns/count).
        count: number of blocks.

    Returns:
        rows×columns.

    Raises:
        MalformedInput: the rows do not divide into blocks.
    """
    rows, width = factor.shape
    if rows % count:
        raise MalformedInput(
            f"a factor of {rows} rows is to have {count} blocks", hint="`nblocks` is of another adapter; copy it again"
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
    """A and B of a module with those that are blocked made whole."""
    if blocks and len(a.shape) == len(b.shape) == 2:
        a = unblocked(a, blocks.count) if is_blocked(blocks.a, module) else a
        b = unblocked(b, blocks.count) if is_blocked(blocks.b, module) else b
    return a, b
