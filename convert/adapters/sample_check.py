"""`--check`: a sample of the written tensors is read again and compared with the sum in float64, element by element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.convert.adapters.low_rank_sum import LoraProduct
from llmconv.convert.adapters.placement.edits import Edits
from llmconv.errors import Inconclusive
from llmconv.tensors import BY_NAME, Array, LazyTensor, cast

SAMPLE = 16
"""Maximum number of tensors of each group (changed, replaced, unchanged), evenly spread over the names."""

BINS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, None))
"""Distances in representable numbers (ULP) that the histogram counts together."""

FLOAT64 = BY_NAME["float64"]

ReadRows = Callable[[int, int], Array]


@dataclass(frozen=True)
class SampleCheck:
    """Result of `check_written`: the number of compared tensors and of their elements, and the differences.

    Attributes:
        histogram: distance from the rounded exact sum, in ULP, to the number of elements.
        differing: names of the tensors with an element that is not the rounded exact sum.
        trusted: names of the tensors that were compared with the formula that merged them, so that only the steps after
            it are checked; the others were compared with an independent sum, or byte by byte.
    """

    tensors: int
    elements: int
    histogram: Mapping[str, int]
    differing: tuple[str, ...]
    trusted: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Lines to print: the histogram unless all distances are 0, and the verdict last."""
        exact = not any(count for label, count in self.histogram.items() if label != "0")
        rows = [] if exact else [f"  {label:>4} ULP  {count:>14,}" for label, count in self.histogram.items()]
        head = f"checked {self.tensors} tensors, {self.elements:,} elements"
        if self.trusted:
            own = self.tensors - len(self.trusted)
            head += f": {own} against a sum of their own, {len(self.trusted)} against the formula that merged them"
        fine = "every element is the exact result, rounded"
        return [head, *rows, f"differs: {', '.join(self.differing)}" if self.differing else fine]

    def as_result(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "tensors": self.tensors,
            "elements": self.elements,
            "ulp": dict(self.histogram),
            "differing": list(self.differing),
            "trusted": list(self.trusted),
        }


def check_written(plan: Checkpoint, edits: Edits, output: Path, *, summed: bool) -> SampleCheck:
    """Compares a sample of a written folder with the sum in float64; Inconclusive if it has no tensor to compare.

    Sums of LoRA updates (`summed`) are computed here from the definition, not by the code that merged; other updates
    and combinations by their own formula in float64. Both are rounded as torch rounds: to float32, and from there to
    narrower types. float64 results are compared as float32, since their last bits depend on the order of summation.
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
    return SampleCheck(len(names), elements, dict(zip(labels, counts.tolist(), strict=True)), tuple(differing), trusted)


def _sample(plan: Checkpoint, edits: Edits) -> list[str]:
    changed = [name for name in plan if name in edits.changes]
    replaced = [name for name in plan if name not in edits.changes and edits.touches(name)]
    others = [name for name in plan if not edits.touches(name)]
    return [name for names in (changed, replaced, others) for name in _spread(names)]


def _spread(names: Sequence[str]) -> list[str]:
    """At most `SAMPLE` of the names: the first, the last, and evenly spaced ones between."""
    if len(names) <= SAMPLE:
        return list(names)
    return [names[round(index * (len(names) - 1) / (SAMPLE - 1))] for index in range(SAMPLE)]


def _exact(plan: Checkpoint, edits: Edits, name: str, summed: bool) -> ReadRows:
    """Reads the expected rows: in float64, or in the stored type if nothing is computed."""
    if name not in edits.changes:
        return plan[name].rows
    if _is_plain(edits, name, summed):
        return _defined(
            edits.current(name), [change for change in edits.changes[name] if isinstance(change, LoraProduct)]
        )
    return cast(plan[name], FLOAT64).rows


def _is_plain(edits: Edits, name: str, summed: bool) -> bool:
    """Whether the tensor only gets a sum of LoRA products."""
    return summed and all(isinstance(change, LoraProduct) for change in edits.changes[name])


def _defined(weight: LazyTensor, changes: Sequence[LoraProduct]) -> ReadRows:
    """Rows of W + Σ s·B·A (of the transposed product for weights stored in×out), from the definition."""
    factors = [(change, change.a.read().astype(np.float64), change.b.read().astype(np.float64)) for change in changes]

    def rows(start: int, stop: int) -> Array:
        total = weight.rows(start, stop).astype(np.float64).reshape(stop - start, -1)
        for change, a, b in factors:
            product = a.T[start:stop] @ b.T if change.transposed else b[start:stop] @ a
            total += change.scale * product
        return total

    return rows


def _distances(found: Array, exact: Array) -> Array:
    """The number of elements per bin of `BINS`, by their distance from the exact ones."""
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
    """Integers in the order of the floats, one apart for neighboring floats; both zeros are 0."""
    bits = np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}").astype(np.int64)
    lowest = -(1 << (8 * values.dtype.itemsize - 1))
    return np.where(bits < 0, lowest - bits, bits)
