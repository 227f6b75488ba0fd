"""Notes on weights that hide differences: NaN, infinity, and matrices of zeros.

A graph and the eager model agree on their results, whatever the graph computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llmconv.tensors import Array, LazyTensor

NAMED = 3
"""Maximum number of tensors that a note names."""
MATRIX = 2
READERS = 2
"""Threads that read tensors."""


def odd_weights(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """A note for each kind of odd tensor; reads the tensors block by block."""
    found: dict[str, list[str]] = {}
    with ThreadPoolExecutor(READERS) as pool:  # reading and numpy's loops run without the interpreter's lock
        for name, kinds in zip(tensors, pool.map(lambda tensor: list(_kinds(tensor)), tensors.values()), strict=True):
            for kind in kinds:
                found.setdefault(kind, []).append(name)
    return [_note(kind, names) for kind, names in found.items()]


def _kinds(tensor: LazyTensor) -> Iterator[str]:
    finite, empty = True, len(tensor.shape) >= MATRIX and tensor.nbytes > 0
    for start, stop in tensor.blocks():
        largest, infinity = _largest(tensor.rows(start, stop))
        finite, empty = finite and largest < infinity, empty and largest == 0
    if not finite:
        yield "NaN or infinity"
    if empty:
        yield "zeros only"


INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}
"""The bits of infinity by dtype; those of finite numbers, without their sign, are smaller, and those of NaN larger."""


def _largest(block: Array) -> tuple[float, float]:
    """The largest bits of a number without its sign, and those of infinity; of other dtypes the numbers themselves."""
    infinity = INFINITY.get(block.dtype.name)
    if infinity is None:
        finite = block.dtype.kind in "biu" or bool(np.isfinite(block).all())
        return (float(block.any()) if finite else np.inf), np.inf
    kind = np.dtype(f"u{block.dtype.itemsize}")
    bits = np.ascontiguousarray(block).view(kind)
    return int((bits & kind.type(np.iinfo(kind).max >> 1)).max(initial=0)), infinity


def _note(kind: str, names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    verb = "contains" if len(names) == 1 else "contain"
    return f"{shown}{more} {verb} {kind}: faults in results that depend on it cannot be seen"
