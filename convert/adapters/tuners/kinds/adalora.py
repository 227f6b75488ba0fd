"""AdaLoRA: W + alpha/(ranknum + 1e-5) · B·diag(E)·A (Zhang et al., arXiv 2303.10512; PEFT `tuners/adalora/layer.py`).

ranknum is the rank before pruning: `init_r`, or a tensor in files of older PEFT.
"""

from __future__ import annotations

from llmconv.convert.adapters.low_rank_sum import thin_product
from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors, RowChange
from llmconv.tensors import Array


def fit(learned: ModuleTensors) -> FittingShape:
    """out×in of B·A; the three ranks must agree (0 is a module that was pruned away)."""
    (rank, columns), (rows, other) = learned.shape("lora_A", 2), learned.shape("lora_B", 2)
    learned.same("the rank", rank, other, learned.shape("lora_E", 2)[0])
    learned.same("the width of `lora_E`", learned.shape("lora_E")[1], 1)
    _ = learned.settings.positive("lora_alpha", 8), _rank_before(learned)
    return rows, columns


def delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update: a product of two thin matrices."""
    scale = learned.settings.positive("lora_alpha", 8) / (_rank_before(learned) + 1e-5)
    left, right = learned.read("lora_B") * scale, learned.read("lora_A") * learned.read("lora_E")

    def rows(weight: Array, start: int) -> Array:
        return thin_product(left[start : start + len(weight)], right)

    return rows


def _rank_before(learned: ModuleTensors) -> float:
    if "ranknum" not in learned.tensors:
        return learned.settings.positive("init_r", 12)
    learned.same("the length of `ranknum`", *learned.shape("ranknum", 1), 1)
    if (rank := float(learned.read("ranknum")[0])) <= 0:
        raise learned.misfit(f"`ranknum` is {rank:g}")
    return rank


TUNER = Tuner(
    peft_type="ADALORA",
    parts=("lora_A", "lora_B", "lora_E", "ranknum"),
    fields=(
        *("r", "target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step"),
        *("rank_pattern", "alpha_pattern", "lora_alpha", "lora_dropout", "init_lora_weights", "use_rslora"),
        *("megatron_core", "loftq_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
    ),
    fit=fit,
    delta=delta,
    conv1d=True,
)
