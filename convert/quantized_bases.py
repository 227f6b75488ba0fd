"""Merges into a quantized base: the sum is stored as plain values, or as the base is if enough of the update stays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from llmconv.background import prefetch
from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.combining import Recipe
from llmconv.convert.models.head_and_dtype import with_dtype
from llmconv.errors import UnsupportedInput, UsageProblem, listing
from llmconv.quantized_weights.packed_weight import TILE_ELEMENTS, PackedWeight, with_recent_rows
from llmconv.quantized_weights.quantized_checkpoint import QuantizedCheckpoint, quantized_checkpoint, with_settings
from llmconv.tensors import BY_NAME, LazyTensor, cast

CHOICES = ("dequantize", "requantize")
NUMBER = r"(?<=\.)\d+(?=\.)"
PLAIN_TYPE = BY_NAME["bfloat16"]


@dataclass(frozen=True)
class QuantizedBase(QuantizedCheckpoint):
    """The base of a merge; a merge into `plain` rounds once."""

    def dequantized(self, merged: Checkpoint, dtype: str) -> Checkpoint:
        """The result of merging into `plain`, with quantized weights rounded once: to bfloat16 for `keep`."""
        if dtype != "keep":
            return merged
        tensors = {
            name: cast(tensor, PLAIN_TYPE) if self._was_quantized(name) else tensor for name, tensor in merged.items()
        }
        return replace(merged, tensors=tensors, config=with_dtype(merged.config, tensors))

    def _was_quantized(self, name: str) -> bool:
        """Whether a merged tensor comes from a quantized weight, also as a copy of a layer."""
        if name in self.plain:
            return name in self.weights
        return re.sub(NUMBER, "{}", name) in {re.sub(NUMBER, "{}", weight) for weight in self.weights}

    def requantized(self, merged: Checkpoint) -> tuple[Checkpoint, dict[str, PackedWeight]]:
        """The result in the base's format, and changed weights; UnsupportedInput if weights moved or were resized."""
        names = {id(tensor): name for name, tensor in self.plain.items()}
        moved = [name for name, tensor in merged.items() if name in self.plain and names.get(id(tensor), name) != name]
        moved += [
            name for name, weight in self.weights.items() if name not in merged or merged[name].shape != weight.shape
        ]
        moved += [name for name in merged if name not in self.plain and self._was_quantized(name)]
        if moved:
            raise UnsupportedInput(
                f"the merge moves or resizes weights of the base, {listing(moved)} among them, which stay quantized",
                hint="give `--base-quant dequantize`",
            )
        changed = {
            name: weight.requantized(with_recent_rows(merged[name]))
            for name, weight in self.weights.items()
            if merged[name] is not self.plain[name]
        }
        home = {part: name for name, weight in self.weights.items() for part in weight.parts}
        tensors = {}
        for name, tensor in self.stored.items():
            if home.get(name) in changed:
                tensors[name] = changed[home[name]].parts[name]
            elif name in home or name not in self.plain:
                tensors[name] = tensor
            elif name in merged:
                tensors[name] = merged[name]
        tensors |= {name: merged[name] for name in merged if name not in tensors and name not in self.weights}
        return replace(merged, tensors=tensors, config=with_settings(merged.config, self.stored.config)), changed

    def retention(self, merged: Checkpoint, changed: Mapping[str, PackedWeight]) -> Retention:
        """How much of the update the `changed` weights keep, each read once; sums do not depend on threads."""
        found = {}
        for name, weight in changed.items():
            rows = with_recent_rows(merged[name])
            spans = rows.blocks(TILE_ELEMENTS * rows.dtype.itemsize)
            changes = (partial(_change, self.plain[name], rows, weight.plain, *span) for span in spans)
            found[name] = _sum(prefetch(changes))
        return Retention(found)

    def changed_parts(self, changed: Mapping[str, PackedWeight]) -> dict[str, str]:
        """Names of the changed tensors in the files, with the plain name of their weight."""
        return {
            part: name
            for name, weight in changed.items()
            for part, tensor in weight.parts.items()
            if tensor is not self.stored[part]
        }


def open_quantized(base: Checkpoint, recipe: Recipe) -> QuantizedBase | None:
    """The quantized base, or None.

    Raises MalformedInput for missing or mismatched parts, UnsupportedInput for an unknown method or without
    `--base-quant`, UsageProblem for options that contradict it.
    """
    found, choice = quantized_checkpoint(base), recipe.base_quant
    if choice is not None and choice not in CHOICES:
        raise UsageProblem(f"invalid `--base-quant {choice}`", hint=f"one of: {', '.join(CHOICES)}")
    if found is None and choice is not None:
        raise UsageProblem(f"`--base-quant {choice}` is given, but the base is not quantized", hint="leave it out")
    if found is not None and choice is None:
        raise UnsupportedInput(
            f"the base is quantized ({found.method.name})",
            hint="give `--base-quant dequantize` for plain bfloat16 weights, or `--base-quant requantize` to store the "
            "result as the base is, where enough of the update survives; better: merge into the unquantized model",
        )
    if choice == "requantize" and recipe.dtype != "keep":
        raise UsageProblem(
            f"`--dtype {recipe.dtype}` is given with `--base-quant requantize`, which keeps the types of the base",
            hint="leave `--dtype` out, or give `--base-quant dequantize`",
        )
    return QuantizedBase(found.stored, found.method, found.weights, found.plain) if found else None


ENOUGH = 0.5
"""Minimum retention and cosine. On a uniform grid both are about one half for updates of a quarter of a step; below,
most of the update is lost, or most of the change is rounding."""


class UpdateSums(NamedTuple):
    """Sums over elements of ΔW² (`wanted`), the change after quantization squared (`found`), products (`common`)."""

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
        return min(self.retention, self.cosine) >= ENOUGH


@dataclass(frozen=True)
class Retention:
    """How much of an update survived, per weight by plain name, and in total."""

    weights: Mapping[str, UpdateSums]

    @property
    def total(self) -> UpdateSums:
        """Over all weights."""
        return _sum(self.weights.values())

    def summary(self) -> dict[str, Any]:
        rows = {"total": self.total, **self.weights}
        return {name: {"retention": change.retention, "cosine": change.cosine} for name, change in rows.items()}

    def require(self) -> tuple[str, ...]:
        """Warnings about the lost part of the update; UnsupportedInput if too little of it survived."""
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
