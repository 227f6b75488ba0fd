"""The quantization methods: one file each in this folder, found by listing it, named after `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from llmconv.checkpoint import Checkpoint
from llmconv.plugins import plugins
from llmconv.quantized_weights.packed_weight import PackedWeight


@dataclass(frozen=True)
class QuantizationMethod:
    """One quantization format; each file of this folder has one as its constant `METHOD`."""

    name: str  # the `quant_method` of a `quantization_config`, equal to the file's name except for `-`
    # `open(checkpoint)` returns the quantized weights by their plain names; it checks their parts from headers and
    # small tensors, and refuses unknown layouts
    open: Callable[[Checkpoint], Mapping[str, PackedWeight]]
    # suffixes of names of tensors that plain weights do not need, such as scales of activations
    dropped: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def methods() -> dict[str, QuantizationMethod]:
    return {row.name: row for row in plugins(__name__, "METHOD", QuantizationMethod).values()}
