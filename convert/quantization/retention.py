"""Retention: how much of an update survives when the merged weight is quantized again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from llmconv.background import prefetch
from llmconv.errors import UnsupportedInput
from llmconv.quantized_weights.packed_weight import TILE_ELEMENTS, PackedWeight, with_recent_rows
from llmconv.tensors import LazyTensor

ENOUGH = 0.5
"""Minimum retention and cosine. On a uniform grid both are about one half for updates of a quarter of a step; below,
most of the update is lost, or most of the change is rounding."""


class UpdateSums(NamedTuple):
    """Sums over elements of the update (ΔW) and of the change after quantization (W'_q - W_q).

    Attributes:
        wanted: Σ ΔW².
        found: Σ (W'_q - W_q)².
        common: Σ ΔW·(W'_q - W_q).
    """

    wanted: float
    found: float
    common: float

    @property
    def retention(self) -> float:
        """‖W'_q - W_q‖ / ‖ΔW‖."""
        return sqrt(self.found / self.wanted) if self.wanted else 1.0

    @property
    def cosine(self) -> float:
        """The cosine between the two; 0 if nothing changed."""
        if not self.wanted:
            return 1.0
        return self.common / sqrt(self.wanted * self.found) if self.found else 0.0

    @property
    def enough(self) -> bool:
        """Whether most of the update survived."""
        return min(self.retention, self.cosine) >= ENOUGH


@dataclass(frozen=True)
class Retention:
    """How much of an update survived, per weight and over all.

    Attributes:
        weights: by plain name.
    """

    weights: Mapping[str, UpdateSums]

    @property
    def total(self) -> UpdateSums:
        """Over all weights."""
        return _sum(self.weights.values())

    def summary(self) -> dict[str, Any]:
        """For `--json`: retention and cosine over all weights, and of each."""
        rows = {"total": self.total, **self.weights}
        return {name: {"retention": change.retention, "cosine": change.cosine} for name, change in rows.items()}

    def require(self) -> tuple[str, ...]:
        """Warnings about the lost part of the update.

        Raises:
            UnsupportedInput: too little of it survived.
        """
        total = self.total
        found = f"retention {total.retention:.2f}, cosine {total.cosine:.2f}"
        if not total.enough:
            raise UnsupportedInput(
                f"requantized, the base keeps too little of the update: {found}, minimum {ENOUGH}",
                hint="give `--base-quant dequantize`; the update is finer than the grid, or leaves its range",
            )
        poor = sorted((change.cosine, name) for name, change in self.weights.items() if not change.enough)
        lines = [f"{len(self.weights)} merged weights are quantized again, which changes the update: {found}"]
        if poor:
            lines.append(f"{len(poor)} weights keep less than {ENOUGH} of their update, least `{poor[0][1]}`")
        return tuple(lines)


def measure(
    before: Mapping[str, LazyTensor], merged: Mapping[str, LazyTensor], after: Mapping[str, PackedWeight]
) -> Retention:
    """Reads every weight of `after` once; the sums do not depend on the number of threads.

    Args:
        before: the plain weights of the base, float32.
        merged: the plain weights of the result, before quantization.
        after: the changed weights of the result.
    """
    found = {}
    for name, weight in after.items():
        rows = with_recent_rows(merged[name])
        spans = rows.blocks(TILE_ELEMENTS * rows.dtype.itemsize)
        found[name] = _sum(prefetch(partial(_change, before[name], rows, weight.plain, *span) for span in spans))
    return Retention(found)


def _change(before: LazyTensor, merged: LazyTensor, after: LazyTensor, start: int, stop: int) -> UpdateSums:
    old = before.rows(start, stop).astype(np.float64)
    wanted = merged.rows(start, stop) - old
    found = after.rows(start, stop) - old
    return UpdateSums(float((wanted * wanted).sum()), float((found * found).sum()), float((wanted * found).sum()))


def _sum(changes: Iterable[UpdateSums]) -> UpdateSums:
    total = UpdateSums(0.0, 0.0, 0.0)
    for change in changes:
        total = UpdateSums(*(one + other for one, other in zip(total, change, strict=True)))
    return total
