"""IA3: rows of W times a vector, or columns in feed-forward modules (arXiv 2205.05638; PEFT `tuners/ia3/layer.py`).

l is out×1, or 1×in in a feed-forward module; the bias is scaled with the rows.
"""

from __future__ import annotations

from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors, RowChange
from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array


def fit(learned: ModuleTensors) -> FittingShape:
    """out or in, by the direction of the vector."""
    if len(learned.shape("ia3_l")) > 2:
        raise UnsupportedInput(
            f"`{learned.module}` is a convolution scaled by IA3", hint="merge it with PEFT's `merge_and_unload`"
        )
    rows, columns = learned.shape("ia3_l", 2)
    learned.same("the short side of `ia3_l`", min(rows, columns), 1)
    return (None, columns) if rows == 1 else (rows, None)


def delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update: W ∘ l - W."""
    excess = learned.read("ia3_l") - 1

    def rows(weight: Array, start: int) -> Array:
        change: Array = weight * (excess if len(excess) == 1 else excess[start : start + len(weight)])
        return change

    return rows


TUNER = Tuner(
    peft_type="IA3",
    parts=("ia3_l",),
    fields=("feedforward_modules",),
    fit=fit,
    delta=delta,
    conv1d=True,
    scales_output=True,
)
