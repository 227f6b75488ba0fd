"""HRA: W·Π(I - 2·uᵢ·uᵢᵀ), Householder reflections of the inputs (arXiv 2405.17484; PEFT `tuners/hra/layer.py`).

hra_u is in×r; its columns are normalized, with `apply_GS` after Gram-Schmidt orthogonalization.
"""

from __future__ import annotations

import numpy as np

from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors, RowChange
from llmconv.tensors import Array


def fit(learned: ModuleTensors) -> FittingShape:
    """in; the rank must be the config's."""
    columns, rank = learned.shape("hra_u", 2)
    learned.same("the rank", rank, int(learned.settings.positive("r", 8)))
    learned.settings.flag("apply_GS")
    return None, columns


def require(learned: ModuleTensors, shape: WeightShape) -> None:
    """Every column is nonzero, also after orthogonalization."""
    if not np.isfinite(_directions(learned)).all():
        raise learned.misfit("a column of `hra_u` is zero, or linearly dependent on those before it")


def delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update, one reflection after the other."""
    vectors = _directions(learned)

    def rows(weight: Array, start: int) -> Array:
        product = weight.copy()
        for vector in vectors:
            product -= 2 * np.outer(product @ vector, vector)
        return product - weight

    return rows


def _directions(learned: ModuleTensors) -> Array:
    """u, one in each row."""
    vectors = learned.read("hra_u").T
    with np.errstate(invalid="ignore", divide="ignore"):
        if learned.settings.flag("apply_GS"):
            # gram-Schmidt: each vector made orthogonal to those before it
            done: list[Array] = []
            for vector in vectors:
                for other in done:
                    vector = vector - (other @ vector) * other
                done.append(vector / np.linalg.norm(vector))
            vectors = np.array(done)
        lengths: Array = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / lengths


TUNER = Tuner(peft_type="HRA", parts=("hra_u",), fields=("r", "apply_GS"), fit=fit, delta=delta, require=require)
