"""VeRA: W + diag(λ_b)·B·diag(λ_d)·A with random A and B shared by all modules (arXiv 2310.11454; PEFT `tuners/vera`).

A is r×(largest in), B (largest out)×r; a module takes the first columns and rows. Files saved with
`save_projection=False` lack both: they are drawn again as PEFT draws them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from llmconv.convert.adapters.low_rank_sum import thin_product
from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.module_tensors import (
    AdapterFields,
    ModuleTensors,
    RowChange,
    TorchRandom,
    invalid_field,
)
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory


def fit(learned: ModuleTensors) -> FittingShape:
    """out; A and B are as wide as the widest module."""
    (rows,), (rank,) = learned.shape("vera_lambda_b", 1), learned.shape("vera_lambda_d", 1)
    learned.same("the rank", rank, learned.rank(256))
    return rows, None


def require(learned: ModuleTensors, shape: WeightShape) -> None:
    """A and B are large enough and of the rank of λ_d."""
    (rank, columns), (rows, other) = learned.shape("vera_A", 2), learned.shape("vera_B", 2)
    learned.same("the rank", learned.shape("vera_lambda_d")[0], rank, other)
    if rows < shape[0] or columns < shape[1]:
        raise learned.misfit(f"`vera_B` and `vera_A` are for {rows}×{columns} weights, one has {shape[0]}×{shape[1]}")


def drawn(settings: AdapterFields, shapes: Sequence[WeightShape]) -> Mapping[str, LazyTensor]:
    """A and B as PEFT draws them (`VeraModel._init_vera_A_vera_B`): uniform in ±√(6/columns), one after the other."""
    if not isinstance(seed := settings.fields.get("projection_prng_key", 0), int):
        raise invalid_field("projection_prng_key", seed)
    draws, rank = TorchRandom(seed), int(settings.positive("r", 256))
    sizes = {"vera_A": (rank, max(columns for _, columns in shapes)), "vera_B": (max(rows for rows, _ in shapes), rank)}
    bounds = {name: math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(columns)) for name, (_, columns) in sizes.items()}
    return {
        name: in_memory(draws.uniform(size, -bounds[name], bounds[name]), BY_NAME["float32"])
        for name, size in sizes.items()
    }


def delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update: a product of two thin matrices."""
    left = learned.read("vera_lambda_b")[:, None] * learned.read("vera_B")[: shape[0]]
    right = learned.read("vera_lambda_d")[:, None] * learned.read("vera_A")[:, : shape[1]]

    def rows(weight: Array, start: int) -> Array:
        return thin_product(left[start : start + len(weight)], right)

    return rows


TUNER = Tuner(
    peft_type="VERA",
    parts=("vera_lambda_b", "vera_lambda_d"),
    fields=("r", "projection_prng_key", "save_projection", "vera_dropout", "d_initial"),
    fit=fit,
    delta=delta,
    require=require,
    shared=("vera_A", "vera_B"),
    drawn=drawn,
    conv1d=True,
)
