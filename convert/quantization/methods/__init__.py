"""The quantization methods: one file each in this folder, found by listing it, called as `quant_method` calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from llmconv.checkpoint import Checkpoint
from llmconv.convert.quantization.packed_weight import PackedWeight
from llmconv.plugins import plugins


@dataclass(frozen=True)
class QuantizationMethod:
    """One way to store weights; each file of this folder has one as its constant `METHOD`.

    Attributes:
        name: the `quant_method` of a `quantization_config`, equal to the file's name but for `-`.
        open: the quantized weights of a checkpoint by the names they have once they are plain, checked against each
            other from the headers, and what else is small; refuses what it does not know.
        dropped: ends of names of tensors that mean nothing once the weights are plain, such as scales of activations.
    """

    name: str
    open: Callable[[Checkpoint], Mapping[str, PackedWeight]]
    dropped: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def methods() -> dict[str, QuantizationMethod]:
    """Every method by name, in alphabetical order."""
    return {row.name: row for row in plugins(__name__, "METHOD", QuantizationMethod).values()}
