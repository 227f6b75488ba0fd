"""Expert weights in either layout: one fused tensor for all experts, or separate tensors per expert.

transformers 5 fuses the tensors that older versions keep separate (`conversion_mapping.py`, "mixtral" and "qwen2_moe"):
gate and up of all experts become `experts.gate_up_proj` [E, 2·I, H], down becomes `experts.down_proj` [E, H, I]. Files
mostly keep `experts.3.gate_proj.weight` or `experts.3.w1.weight`. Adapter and base may have different layouts, so a
missing name may be a part of a fused tensor, or several separate ones. Unsloth divides gpt-oss's experts into lists of
layers, `experts.gate_up_projs.3` and `experts.down_projs.3`, whose rows stay in the order of the fused tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmconv.convert.adapters.low_rank_sum import LoraProduct, add_products_to_rows
from llmconv.convert.algebra.rounding import round_into
from llmconv.tensors import Array, DType, LazyTensor

PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Name of a fused tensor to the separate tensors that it stacks by rows, under each naming convention."""

ONE = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<part>\w+)\.weight")
FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<name>gate_up_proj|down_proj)")


@dataclass(frozen=True)
class ExpertProduct:
    """The product added to `count` rows, from row `first`, of one expert (index in dim 0) of a fused tensor."""

    expert: int
    first: int
    count: int
    change: LoraProduct


@dataclass(frozen=True)
class ExpertRows:
    """The rows of a fused tensor that hold the matrix of one expert (dim 0), possibly stored in×out (`either`)."""

    tensor: str
    expert: int
    first: int
    count: int
    either: bool = False


ExpertTensors = tuple[tuple[str, ...], ...]
"""The separate tensors of each expert that make up a fused tensor, in the order in which it stacks them."""


def fused_tensors(tensors: Mapping[str, LazyTensor]) -> dict[str, ExpertTensors]:
    """Names of the fused tensors that a file with separate experts lacks, to their separate tensors."""
    found: dict[str, dict[str, set[int]]] = {}
    for name in tensors:
        if match := ONE.fullmatch(name):
            found.setdefault(match["experts"], {}).setdefault(match["part"], set()).add(int(match["index"]))
    result: dict[str, ExpertTensors] = {}
    for experts, parts in found.items():
        for fused, conventions in PARTS.items():
            for convention in conventions:
                indices = parts.get(convention[0], set())
                complete = indices and all(parts.get(part) == indices for part in convention)
                if complete and indices == set(range(len(indices))):
                    result[f"{experts}.{fused}"] = tuple(
                        tuple(f"{experts}.{index}.{part}.weight" for part in convention) for index in sorted(indices)
                    )
    return {name: stack for name, stack in result.items() if name not in tensors}


def separate_tensors(tensors: Mapping[str, LazyTensor]) -> dict[str, ExpertRows]:
    """Names of the separate tensors that a file with fused experts lacks, to their location."""
    result: dict[str, ExpertRows] = {}
    for name, tensor in tensors.items():
        match = FUSED.fullmatch(name)
        if not match or len(tensor.shape) != 3:
            continue
        for convention in PARTS[match["name"]]:
            count = tensor.shape[1] // len(convention)
            for index in range(tensor.shape[0]):
                for at, part in enumerate(convention):
                    result[f"{match['experts']}.{index}.{part}.weight"] = ExpertRows(name, index, at * count, count)
        for index in range(tensor.shape[0]):
            listed = f"{match['experts']}.{match['name']}s.{index}.weight"
            result[listed] = ExpertRows(name, index, 0, tensor.shape[1], either=True)
    return {name: part for name, part in result.items() if name not in tensors}


def add_to_experts(base: LazyTensor, products: Sequence[ExpertProduct], dtype: DType) -> LazyTensor:
    """A fused tensor [E, rows, columns] plus the updates of its experts, rounded once; see `add_products`.

    Updates of the same rows are summed.
    """
    by_expert: dict[int, list[ExpertProduct]] = {}
    for product in products:
        by_expert.setdefault(product.expert, []).append(product)

    def load(start: int, stop: int) -> Array:
        rows = base.rows(start, stop)
        result = np.empty(rows.shape, dtype.numpy)
        for expert in range(start, stop):
            _add_to_expert(result[expert - start], rows[expert - start], by_expert.get(expert, []), dtype)
        return result

    return LazyTensor(dtype, base.shape, load, lambda other: add_to_experts(base, products, other))


def _add_to_expert(result: Array, rows: Array, products: Sequence[ExpertProduct], dtype: DType) -> None:
    """Adds the products of one expert; all rows between two edges are updated by the same products."""
    edges = sorted({0, len(rows), *(edge for each in products for edge in (each.first, each.first + each.count))})
    for start, stop in zip(edges, edges[1:], strict=False):
        here = [each for each in products if each.first <= start and stop <= each.first + each.count]
        pairs = [product.change.factors(start - product.first, stop - product.first) for product in here]
        if pairs:
            result[start:stop] = add_products_to_rows(rows[start:stop], pairs, dtype)
        else:
            wide = rows[start:stop].astype(np.float64)
            round_into(result[start:stop], wide)
