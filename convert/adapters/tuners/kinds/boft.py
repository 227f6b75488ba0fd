"""BOFT: diag(s)·W·Bᵀ with B a product of butterfly rotations (arXiv 2311.06243; PEFT `tuners/boft/layer.py`).

boft_R is factors×blocks×k×k: each block is the Cayley transform of its skew part, and factor i is between a permutation
of the inputs and its inverse, so that it mixes inputs 2ⁱ half blocks apart. boft_s is out×1 (a convolution: 1×out).
"""

from __future__ import annotations

import numpy as np

from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.kinds.oft import cayley, rotate
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors, RowChange
from llmconv.tensors import Array


def fit(learned: ModuleTensors) -> FittingShape:
    """out of the scale, in of the blocks."""
    (factors, blocks, size, other), scale = learned.shape("boft_R", 4), learned.shape("boft_s", 2)
    learned.same("the side of a block", size, other)
    learned.same("the short side of `boft_s`", min(scale), 1)
    if factors > 1 and (size % 2 or blocks % 2 ** (factors - 1)):
        raise learned.misfit(f"{factors} factors of {blocks} blocks of {size}")
    return max(scale), blocks * size


def delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update; a permutation and a rotation per factor."""
    stored, scale = learned.read("boft_R"), learned.read("boft_s").reshape(-1, 1)
    skew = 0.5 * (stored - stored.swapaxes(2, 3))
    turned = [cayley(blocks).transpose(0, 2, 1) for blocks in skew]
    orders = [_order(shape[1], stored.shape[2], number, len(stored)) for number in range(len(stored))]

    def rows(weight: Array, start: int) -> Array:
        product = weight
        for blocks, order in zip(turned, orders, strict=True):
            product = rotate(product[:, np.argsort(order)], blocks)[:, order]
        return product * scale[start : start + len(weight)] - weight

    return rows


def _order(columns: int, size: int, number: int, factors: int) -> Array:
    """The permutation of factor `number` (PEFT `block_butterfly_perm`): even half blocks of a group before odd ones."""
    index = np.arange(columns)
    if factors == 1:
        return index
    halves = index.reshape(-1, 2 << number, size // 2)
    return np.concatenate([halves[:, 0::2], halves[:, 1::2]], axis=1).reshape(-1)


TUNER = Tuner(
    peft_type="BOFT",
    parts=("boft_R", "boft_s"),
    fields=("boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout"),
    fit=fit,
    delta=delta,
)
