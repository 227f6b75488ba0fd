"""StoredFormats: the weights that a checkpoint already stores as codes, and how graphs read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmconv.export.quantization.block_format import BlockFormat
from llmconv.export.quantization.repacked_weight import RepackedWeight, repacked
from llmconv.export.quantization.settings import INT8
from llmconv.quantized_weights.quantized_checkpoint import QuantizedCheckpoint


@dataclass(frozen=True)
class StoredFormats:
    """The formats, by name, of the weights of a checkpoint quantized by `method`, such as `gptq`.

    None for a weight whose codes onnxruntime has no operator for, which is quantized again to 8 bits.
    """

    method: str
    weights: Mapping[str, RepackedWeight | None]

    @classmethod
    def of(cls, checkpoint: QuantizedCheckpoint) -> StoredFormats:
        """The formats of all its quantized weights; reads zero points and orders of columns, but no codes."""
        found = {name: weight.integers for name, weight in checkpoint.weights.items()}
        return cls(checkpoint.method.name, {name: repacked(one) if one else None for name, one in found.items()})

    @property
    def without_operator(self) -> list[str]:
        """The weights that are quantized again."""
        return [name for name, weight in self.weights.items() if weight is None]

    def format_of(self, name: str, parameter: str, layer: int | None, layers: int) -> BlockFormat | None:
        """As `QuantizationSettings.format_of`."""
        if name not in self.weights:
            return None
        weight = self.weights[name]
        return weight.form if weight else INT8

    def stored(self, name: str) -> RepackedWeight | None:
        """The codes of a weight that are kept; None if it is quantized again."""
        return self.weights.get(name)

    def least_elements(self, total: int) -> float:
        """As `QuantizationSettings.least_elements`: none is too small."""
        return 0

    def manifest_fields(self) -> dict[str, Any]:
        """Fields of the manifest."""
        return {"quant": self.method}
