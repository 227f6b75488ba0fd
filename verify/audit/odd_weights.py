"""Notes on weights that hide differences: NaN, infinity, and matrices of zeros.

A graph and the eager model agree on their results, whatever the graph computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from llmconv.tensors import LazyTensor

NAMED = 3
"""Maximum number of tensors that a note names."""
MATRIX = 2


def odd_weights(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """A note for each kind of odd tensor; reads the tensors block by block."""
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        for kind in _kinds(tensor):
            found.setdefault(kind, []).append(name)
    return [_note(kind, names) for kind, names in found.items()]


def _kinds(tensor: LazyTensor) -> Iterator[str]:
    finite, empty = True, len(tensor.shape) >= MATRIX and tensor.nbytes > 0
    for start, stop in tensor.blocks():
        block = tensor.rows(start, stop)
        finite = finite and (block.dtype.kind in "biu" or bool(np.isfinite(block).all()))
        empty = empty and not block.any()
    if not finite:
        yield "NaN or infinity"
    if empty:
        yield "zeros only"


def _note(kind: str, names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    verb = "contains" if len(names) == 1 else "contain"
    return f"{shown}{more} {verb} {kind}: faults in results that depend on it cannot be seen"
