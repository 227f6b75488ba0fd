"""Check: a sample of a written merge, read again and compared with the sum in float64, element by element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.convert.adapters.placement.edits import Edits
from llmconv.convert.adapters.weighted_sum import LowRank
from llmconv.errors import Inconclusive
from llmconv.tensors import BY_NAME, Array, LazyTensor, cast

SAMPLE = 16
"""Tensors that were changed, replaced or left alone, of each so many at most, evenly spread over the names."""

BINS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, None))
"""Distances that the histogram counts together, in representable numbers."""

FLOAT64 = BY_NAME["float64"]

Rows = Callable[[int, int], Array]


@dataclass(frozen=True)
class Check:
    """What comparing gave.

    Attributes:
        tensors: how many were compared.
        elements: how many elements they have.
        histogram: how many elements are how far from the exact sum rounded, in representable numbers.
        differing: names of the tensors with an element that is not that number.
        trusted: names of the tensors whose sum was made by the formula that merged them, so that only what came after
            it is checked; the others were compared with a sum made from the definition, or with the very bytes.
    """

    tensors: int
    elements: int
    histogram: Mapping[str, int]
    differing: tuple[str, ...]
    trusted: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For people: the histogram, and the verdict last."""
        rows = [f"  {label:>4} ULP  {count:>14,}" for label, count in self.histogram.items()]
        head = f"checked {self.tensors} tensors, {self.elements:,} elements"
        if self.trusted:
            own = self.tensors - len(self.trusted)
            head += f": {own} against a sum of their own, {len(self.trusted)} against the formula that merged them"
        fine = "every element is the exact result, rounded"
        return [head, *rows, f"differs: {', '.join(self.differing)}" if self.differing else fine]

    def as_result(self) -> dict[str, Any]:
        """For programs."""
        return {
            "tensors": self.tensors,
            "elements": self.elements,
            "ulp": dict(self.histogram),
            "differing": list(self.differing),
            "trusted": list(self.trusted),
        }


def check_written(plan: Checkpoint, edits: Edits, output: Path, *, summed: bool) -> Check:
    """Compares a sample of a written folder with the sum in float64.

    The sum of LoRA changes is made here, from the definition, not by the code that merged. Of other kinds of changes
    and combinations it is the formula's own in float64. Both are rounded as torch rounds: to float32, and from there
    to narrower types. float64 results, whose last bits no sum knows, are compared as float32.

    Args:
        plan: the merged tensors, as they were to be written.
        edits: what was done to which tensor.
        output: the folder.
        summed: the changes were added, not combined in another way.

    Raises:
        Inconclusive: the folder has no tensor to compare.
    """
    written = open_checkpoint(output)
    counts, elements, differing = np.zeros(len(BINS), np.int64), 0, []
    names = _sample(plan, edits)
    if not names:
        raise Inconclusive("the merged folder has no tensors", hint="check the base folder")
    for name in names:
        exact, tensor = _exact(plan, edits, name, summed), written[name]
        found = np.zeros(len(BINS), np.int64)
        for start, stop in tensor.blocks():
            rows = tensor.rows(start, stop)
            found += _distances(rows, exact(start, stop).reshape(rows.shape))
        counts, elements = counts + found, elements + int(found.sum())
        if found[1:].any():
            differing.append(name)
    labels = [f"{low}+" if high is None else str(low) if low == high else f"{low}-{high}" for low, high in BINS]
    trusted = tuple(name for name in names if name in edits.changes and not _is_plain(edits, name, summed))
    return Check(len(names), elements, dict(zip(labels, counts.tolist(), strict=True)), tuple(differing), trusted)


def _sample(plan: Checkpoint, edits: Edits) -> list[str]:
    changed = [name for name in plan if name in edits.changes]
    replaced = [name for name in plan if name not in edits.changes and edits.touches(name)]
    others = [name for name in plan if not edits.touches(name)]
    return [name for names in (changed, replaced, others) for name in _spread(names)]


def _spread(names: Sequence[str]) -> list[str]:
    """At most `SAMPLE` of them: the first, the last, and some between."""
    if len(names) <= SAMPLE:
        return list(names)
    return [names[round(index * (len(names) - 1) / (SAMPLE - 1))] for index in range(SAMPLE)]


def _exact(plan: Checkpoint, edits: Edits, name: str, summed: bool) -> Rows:
    """What rows of the tensor should be: float64, or the very values where nothing is computed."""
    if name not in edits.changes:
        return plan[name].rows
    if _is_plain(edits, name, summed):
        return _defined(edits.current(name), [change for change in edits.changes[name] if isinstance(change, LowRank)])
    return cast(plan[name], FLOAT64).rows


def _is_plain(edits: Edits, name: str, summed: bool) -> bool:
    """Whether the definition of what is done to a tensor is a sum of products."""
    return summed and all(isinstance(change, LowRank) for change in edits.changes[name])


def _defined(weight: LazyTensor, changes: Sequence[LowRank]) -> Rows:
    """W + Σ s·B·A (its transpose for weights stored so), by rows of the weight."""
    factors = [(change, change.a.read().astype(np.float64), change.b.read().astype(np.float64)) for change in changes]

    def rows(start: int, stop: int) -> Array:
        total = weight.rows(start, stop).astype(np.float64).reshape(stop - start, -1)
        for change, a, b in factors:
            product = a.T[start:stop] @ b.T if change.transposed else b[start:stop] @ a
            total += change.scale * product
        return total

    return rows


def _distances(found: Array, exact: Array) -> Array:
    """How many elements are how far from the exact ones, by `BINS`."""
    if found.dtype.kind not in "fV":
        steps: Array = (found != exact).astype(np.int64).reshape(-1)
    elif exact.dtype == np.float64:
        kind = np.dtype(np.float32) if found.dtype.itemsize == 8 else found.dtype
        with np.errstate(over="ignore"):
            steps = np.abs(_ordered(found.astype(kind)) - _ordered(exact.astype(np.float32).astype(kind)))
    else:
        steps = np.abs(_ordered(found) - _ordered(exact))
    edges = [low for low, _ in BINS]
    return np.bincount(np.searchsorted(edges, steps.reshape(-1), side="right") - 1, minlength=len(BINS))


def _ordered(values: Array) -> Array:
    """Integers in the order of the floats, one apart where the floats are neighbours; both zeros are 0."""
    bits = np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}").astype(np.int64)
    lowest = -(1 << (8 * values.dtype.itemsize - 1))
    return np.where(bits < 0, lowest - bits, bits)
