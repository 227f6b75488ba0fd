"""LoHa: W + alpha/r · (w1_a·w1_b) ∘ (w2_a·w2_b) (FedPara, arXiv 2108.06098; PEFT `tuners/loha/layer.py`).

Convolutions may also have a core t (r×r×k×k): then `a` is r×out, `b` is r×in, and the factor is Σᵢⱼ tᵢⱼ aᵢ bⱼ.
"""

from __future__ import annotations

from math import prod

import numpy as np

from llmconv.convert.adapters.low_rank_sum import thin_product
from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors, RowChange
from llmconv.tensors import Array


def fit(learned: ModuleTensors) -> FittingShape:
    """out×in of the two factors, which must agree."""
    first, second = _factor(learned, "1"), _factor(learned, "2")
    learned.scale()
    return learned.same("out", first[0], second[0]), learned.same("in", first[1], second[1])


def _factor(learned: ModuleTensors, number: str) -> WeightShape:
    """out×in of one factor."""
    a, b = learned.shape(f"hada_w{number}_a", 2), learned.shape(f"hada_w{number}_b", 2)
    if f"hada_t{number}" not in learned.tensors:
        learned.same("the rank", a[1], b[0], learned.rank())
        return a[0], b[1]
    core = learned.shape(f"hada_t{number}", 4)
    learned.same("the rank", a[0], b[0], *core[:2], learned.rank())
    return a[1], b[1] * prod(core[2:])


def delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update: two thin products, multiplied element by element."""
    (left1, right1), (left2, right2) = (_thin(learned, number) for number in "12")
    scale = learned.scale()

    def rows(weight: Array, start: int) -> Array:
        part = slice(start, start + len(weight))
        product = thin_product(left1[part], right1)
        product *= thin_product(left2[part], right2)
        product *= scale
        return product

    return rows


def _thin(learned: ModuleTensors, number: str) -> tuple[Array, Array]:
    """Two matrices out×r and r×in whose product is the factor."""
    a, b = learned.read(f"hada_w{number}_a"), learned.read(f"hada_w{number}_b")
    if f"hada_t{number}" not in learned.tensors:
        return a, b
    core = learned.read(f"hada_t{number}")
    return a.T, np.einsum("ijkl,jr->irkl", core, b).reshape(len(core), -1)


TUNER = Tuner(
    peft_type="LOHA",
    parts=("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    fields=("r", "alpha", "rank_pattern", "alpha_pattern", "rank_dropout", "module_dropout", "use_effective_conv2d"),
    fit=fit,
    delta=delta,
)
