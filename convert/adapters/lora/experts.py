"""Expert weights under either of their names: one tensor for all experts, or one for each.

transformers 5 fuses what older versions keep apart (`conversion_mapping.py`, "mixtral" and "qwen2_moe"): gate and up of
all experts become `experts.gate_up_proj` [E, 2·I, H], down becomes `experts.down_proj` [E, H, I]. Files mostly keep
`experts.3.gate_proj.weight` or `experts.3.w1.weight`. An adapter may be of the one model and the base's file of the
other, so a name that is not there may mean a part of one tensor, or several of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmconv.convert.adapters.weighted_sum import LoraProduct, add_products_to_rows
from llmconv.convert.algebra.rounding import round_into
from llmconv.tensors import Array, DType, LazyTensor

PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""The fused tensor, and what of each expert lies in it, one below the other, under two habits of naming."""

ONE = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<part>\w+)\.weight")
FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<name>gate_up_proj|down_proj)")


@dataclass(frozen=True)
class ExpertProduct:
    """A change of some rows of one expert in a fused tensor.

    Attributes:
        expert: index of the expert: of dim 0.
        first: the first row that changes.
        count: how many rows change.
        change: of `count` rows.
    """

    expert: int
    first: int
    count: int
    change: LoraProduct


@dataclass(frozen=True)
class ExpertRows:
    """Where one expert's matrix lies in a fused tensor.

    Attributes:
        tensor: its name.
        expert: index of the expert.
        first: the first of its rows.
        count: how many rows it has.
    """

    tensor: str
    expert: int
    first: int
    count: int


ExpertTensors = tuple[tuple[str, ...], ...]
"""The tensors of each expert that make up a fused one, in the order in which they lie below each other."""


def stacks(tensors: Mapping[str, LazyTensor]) -> dict[str, ExpertTensors]:
    """The fused tensors that a file with one tensor per expert does not have, by the names they would have."""
    found: dict[str, dict[str, set[int]]] = {}
    for name in tensors:
        if match := ONE.fullmatch(name):
            found.setdefault(match["experts"], {}).setdefault(match["part"], set()).add(int(match["index"]))
    result: dict[str, ExpertTensors] = {}
    for experts, parts in found.items():
        for fused, habits in PARTS.items():
            for habit in habits:
                indices = parts.get(habit[0], set())
                if (
                    indices == set(range(len(indices)))
                    and indices
                    and all(parts.get(part) == indices for part in habit)
                ):
                    result[f"{experts}.{fused}"] = tuple(
                        tuple(f"{experts}.{index}.{part}.weight" for part in habit) for index in range(len(indices))
                    )
    return {name: stack for name, stack in result.items() if name not in tensors}


def parts(tensors: Mapping[str, LazyTensor]) -> dict[str, ExpertRows]:
    """The tensors of each expert that a file with fused ones does not have, by the names they would have."""
    result: dict[str, ExpertRows] = {}
    for name, tensor in tensors.items():
        match = FUSED.fullmatch(name)
        if not match or len(tensor.shape) != 3:
            continue
        for habit in PARTS[match["name"]]:
            count = tensor.shape[1] // len(habit)
            for index in range(tensor.shape[0]):
                for at, part in enumerate(habit):
                    result[f"{match['experts']}.{index}.{part}.weight"] = ExpertRows(name, index, at * count, count)
    return {name: part for name, part in result.items() if name not in tensors}


def add_to_experts(base: LazyTensor, slabs: Sequence[ExpertProduct], dtype: DType) -> LazyTensor:
    """A fused tensor with the changes of its experts, rounded once; arithmetic and errors as in `add_products`.

    Args:
        base: E×rows×columns.
        slabs: changes; those of the same rows are summed.
        dtype: element type of the result.
    """
    by_expert: dict[int, list[ExpertProduct]] = {}
    for slab in slabs:
        by_expert.setdefault(slab.expert, []).append(slab)

    def load(start: int, stop: int) -> Array:
        rows = base.rows(start, stop)
        result = np.empty(rows.shape, dtype.numpy)
        for expert in range(start, stop):
            _add_slabs(result[expert - start], rows[expert - start], by_expert.get(expert, []), dtype)
        return result

    return LazyTensor(dtype, base.shape, load, lambda other: add_to_experts(base, slabs, other))


def _add_slabs(result: Array, rows: Array, slabs: Sequence[ExpertProduct], dtype: DType) -> None:
    """One expert: rows between two edges are touched by the same changes."""
    edges = sorted({0, len(rows), *(edge for slab in slabs for edge in (slab.first, slab.first + slab.count))})
    for start, stop in zip(edges, edges[1:], strict=False):
        here = [slab for slab in slabs if slab.first <= start and stop <= slab.first + slab.count]
        pairs = [slab.change.factors(start - slab.first, stop - slab.first) for slab in here]
        if pairs:
            result[start:stop] = add_products_to_rows(rows[start:stop], pairs, dtype)
        else:
            wide = rows[start:stop].astype(np.float64)
            round_into(result[start:stop], wide)
