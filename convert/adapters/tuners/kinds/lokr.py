"""LoKr: W + alpha/r · w1 ⊗ w2 (KronA, arXiv 2212.10650; LyCORIS, arXiv 2309.14859; PEFT `tuners/lokr/layer.py`).

w1 is whole or w1_a·w1_b; w2 is whole, w2_a·w2_b, or for a convolution Σᵢⱼ t2ᵢⱼ w2_aᵢ w2_bⱼ with a core t2 (r×r×k×k).
"""

from __future__ import annotations

from math import prod

import numpy as np

from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors, RowChange
from llmconv.tensors import Array


def fit(learned: ModuleTensors) -> FittingShape:
    """out×in of the Kronecker product; kernel sizes count as columns."""
    first, second = _shape(learned, "1"), _shape(learned, "2")
    learned.same("the dimensions of `lokr_w1`", len(first), 2)
    learned.scale()
    return first[0] * second[0], first[1] * prod(second[1:])


def _shape(learned: ModuleTensors, number: str) -> tuple[int, ...]:
    if (whole := f"lokr_w{number}") in learned.tensors:
        shape = learned.shape(whole)
        return shape if len(shape) > 1 else learned.shape(whole, 2)
    a, b = learned.shape(f"lokr_w{number}_a", 2), learned.shape(f"lokr_w{number}_b", 2)
    if number == "2" and "lokr_t2" in learned.tensors:
        core = learned.shape("lokr_t2", 4)
        learned.same("the rank", a[0], b[0], *core[:2])
        return a[1], b[1], *core[2:]
    learned.same("the rank", a[1], b[0])
    return a[0], b[1]


def delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Row p is row p // c of w1 times row p % c of w2 (c rows); PEFT multiplies a w2 of three dims unflattened."""
    left, right = _read(learned, "1") * learned.scale(), _read(learned, "2")
    if right.ndim == 3:
        whole = np.kron(left, right).reshape(shape)
        return lambda weight, start: whole[start : start + len(weight)]
    right = right.reshape(len(right), -1)

    def rows(weight: Array, start: int) -> Array:
        index = np.arange(start, start + len(weight))
        outer = left[index // len(right), :, None] * right[index % len(right), None, :]
        return outer.reshape(len(weight), -1)

    return rows


def _read(learned: ModuleTensors, number: str) -> Array:
    if (whole := f"lokr_w{number}") in learned.tensors:
        return learned.read(whole)
    a, b = learned.read(f"lokr_w{number}_a"), learned.read(f"lokr_w{number}_b")
    if number == "2" and "lokr_t2" in learned.tensors:
        made: Array = np.einsum("ijkl,ip,jr->prkl", learned.read("lokr_t2"), a, b, optimize=True)
        return made
    product: Array = a @ b
    return product


TUNER = Tuner(
    peft_type="LOKR",
    parts=("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    fields=(
        *("r", "alpha", "rank_pattern", "alpha_pattern", "rank_dropout", "rank_dropout_scale", "module_dropout"),
        *("use_effective_conv2d", "decompose_both", "decompose_factor"),
    ),
    fit=fit,
    delta=delta,
)
