"""Stanford Alpaca's deltas: float32 differences from a base whose new tokens are the mean of the others; its checksum.

`weight_diff.py` of tatsu-lab/stanford_alpaca resizes the base as its training did and adds in float32. It then compares
the sum of all parameters and buffers with a constant; epfml/landmark-attention, which adopted the script, stores that
number next to the weights in `checksum_psum.txt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import fsum, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.tensors import BY_NAME, FLOATS, Array, LazyTensor

CHECKSUM = "checksum_psum.txt"

SEVEN_BILLION = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32001}
SEVEN_BILLION_SUM = 50637.1836
"""The constant in the script; only the 7B model was published."""

TOLERANCE = 0.5
"""Both numbers are sums in float32 with rounding errors of about 0.1; another base is off by hundreds."""

SMALL, FEW = 0.5, 64
"""Norm of a row close to zero, relative to the mean row; number of new rows to check."""


def begins_at_mean(base: LazyTensor, delta: LazyTensor) -> bool:
    """Whether new rows of an embedding are differences from the mean of the base's rows [tokens, dim], not from zeros.

    A padding token is never trained, so its row of the delta is about zero then, and about the mean otherwise.
    """
    if delta.dtype.name != "float32" or base.dtype.name not in FLOATS or len(base.shape) != 2:
        return False  # FastChat's are float16
    new = delta.rows(base.num_rows, min(delta.num_rows, base.num_rows + FEW)).astype(np.float64)
    return bool(np.linalg.norm(new, axis=1).min() < SMALL * np.linalg.norm(_mean(base)))


def with_mean_rows(base: LazyTensor, count: int) -> LazyTensor:
    """The base's rows in float32, followed by copies of their mean up to `count` rows."""
    kind, known = BY_NAME["float32"], base.num_rows
    mean: list[Array] = []

    def load(start: int, stop: int) -> Array:
        rows = np.empty((stop - start, *base.shape[1:]), kind.numpy)
        last = max(start, min(stop, known))
        if start < last:
            rows[: last - start] = base.rows(start, last)
        if last < stop:
            mean[:] = mean or [_mean(base)]
            rows[last - start :] = mean[0]
        return rows

    return LazyTensor(kind, (count, *base.shape[1:]), load)


def _mean(tensor: LazyTensor) -> Array:
    total = np.zeros(tensor.shape[1:])
    for block in tensor.blocks():
        total += tensor.rows(*block).astype(np.float64).sum(0)
    return np.asarray(total / tensor.num_rows)


@dataclass
class WeightSum:
    """Compares the sum of all weights, taken while they are read, with the published one (`expected`).

    `buffers` is the sum of the rotary frequencies, which older models have among their tensors.
    """

    source: str
    expected: float
    buffers: float
    _sums: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)
    _size: int = 0

    def watched(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The same tensors, whose rows are added to the sum when they are read."""
        self._size = sum(tensor.nbytes // tensor.dtype.itemsize for tensor in tensors.values())
        return {name: self._watched(name, tensor) for name, tensor in tensors.items()}

    def _watched(self, name: str, tensor: LazyTensor) -> LazyTensor:
        def load(start: int, stop: int) -> Array:
            rows = tensor.rows(start, stop)
            self._sums[name, start] = rows.size, float(rows.sum(dtype=np.float64))
            return rows

        return LazyTensor(tensor.dtype, tensor.shape, load)

    def problems(self) -> list[str]:
        """A warning if the sum differs or is incomplete; call it after everything is written."""
        if sum(size for size, _ in self._sums.values()) != self._size:
            return [f"{self.source} was not compared, because the run was resumed"]
        found = fsum(total for _, total in self._sums.values())
        if min(abs(found - self.expected), abs(found + self.buffers - self.expected)) <= TOLERANCE:
            return []
        problem = f"all weights add up to {found:.2f}, expected {self.expected:.2f} ({self.source})"
        return [f"{problem}: is the base another one, or a file damaged?"]


def checksum_of(folder: Path, config: Mapping[str, Any], *, mean_rows: bool) -> WeightSum | None:
    """The checksum of a delta folder, or None; `config` is the tuned model's.

    With `mean_rows` new tokens are differences from the mean row, as Stanford's are.
    """
    path = folder / CHECKSUM
    if path.is_file() and path.stat().st_size < 100:
        try:
            number = float(path.read_text())
        except ValueError:
            number = float("nan")
        return WeightSum(f"`{CHECKSUM}`", number, rotary_sum(config)) if isfinite(number) else None
    if mean_rows and all(config.get(name) == value for name, value in SEVEN_BILLION.items()):
        return WeightSum("Stanford's script for Alpaca 7B", SEVEN_BILLION_SUM, rotary_sum(config))
    return None


def rotary_sum(config: Mapping[str, Any]) -> float:
    """The sum of the rotary frequencies of all layers of a Llama, θ^(-2i/d); 0 for other models."""
    sizes: list[Any] = [config.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")]
    if not all(type(size) is int and 0 < size < 1 << 20 for size in sizes):
        return 0.0
    width, layers = sizes[0] // sizes[1], sizes[2]
    return float(layers * (10000.0 ** -(np.arange(0, width, 2) / max(1, width))).sum())
