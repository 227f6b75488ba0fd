"""Which nodes of a graph a provider of onnxruntime has no kernel for; onnxruntime runs them on the CPU.

Only nodes that read floating-point numbers count. Providers leave computations on shapes, lengths and token ids to the
CPU on purpose (CUDA's by `GetCpuPreferredNodes`, WebGPU's because it has no int64): they are small, and some of their
results are needed there anyway.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import onnx

from llmconv.export.targets.element_types import FLOATS, TypedNode, typed_nodes


@dataclass(frozen=True)
class Fallback:
    """Nodes of one operator and element types that have no kernel: their number, and the name of the first.

    `operator` is such as `com.microsoft:GroupQueryAttention`; `types` are those of the inputs, without duplicates.
    """

    operator: str
    types: tuple[str, ...]
    count: int
    first: str

    def __str__(self) -> str:
        return f"`{self.operator}` ({', '.join(self.types)})"

    def manifest_fields(self) -> dict[str, Any]:
        """Fields of one entry of `fallback` in the manifest."""
        return {"operator": self.operator, "types": list(self.types), "count": self.count, "first": self.first}


@cache
def kernel_table(target: str) -> Mapping[str, Any]:
    """The table of a target, `{target}.json` in this package: `source`, `onnxruntime` and `kernels`.

    `kernels` has rows `[first version, last version or None, {type constraint: element types}]` by operator, as
    `tools/target_tables.py` writes them.
    """
    table: Mapping[str, Any] = json.loads((files(__package__) / f"{target}.json").read_text())
    return table


def fallbacks(model: onnx.ModelProto, target: str) -> list[Fallback]:
    """The nodes that read floats and have no kernel in the target's table; the functions of `model` are inlined."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    first: dict[tuple[str, tuple[str, ...]], str] = {}
    for node in typed_nodes(model):
        if FLOATS.intersection(node.inputs) and not has_kernel(node, target):
            key = (node.operator, tuple(dict.fromkeys(node.inputs)))
            counts[key] += 1
            first.setdefault(key, node.name or node.operator)
    return [Fallback(*key, count, first[key]) for key, count in counts.items()]


def has_kernel(node: TypedNode, target: str) -> bool:
    """Whether the provider of a target has a kernel for a node."""
    rows = kernel_table(target)["kernels"].get(node.operator, [])
    return node.operator == "Constant" or any(
        _is_version(node.version, begin, end) and _fits(node.bound, types) for begin, end, types in rows
    )


def _is_version(version: int, begin: int, end: int | None) -> bool:
    """onnxruntime's rule: an open range promises nothing about later versions (`KernelRegistry::VerifyVersion`)."""
    return version == begin or (end is not None and begin <= version <= end)


def _fits(bound: Mapping[str, set[str]], types: Mapping[str, str]) -> bool:
    return all(bound.get(name, set()) <= set(allowed.split()) for name, allowed in types.items())
