"""ActivationRange: a range that is known before a graph runs, and the nodes that round a value in it.

Toolchains for NPUs read `QuantizeLinear` and `DequantizeLinear` with constant scale and zero point (ONNX,
docs/Operators.md); runtimes fuse them with the product that follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmconv.export.node_editor import NodeEditor, constant

STEPS = 255
"""Between the smallest and the largest code of uint8."""


@dataclass(frozen=True)
class ActivationRange:
    """A value is `(code - zero) * scale` (float32), with codes of 0 to 255; `zero` is the code of 0."""

    scale: float
    zero: int

    @classmethod
    def of(cls, low: float, high: float) -> ActivationRange:
        """The range from `low` to `high`, extended to contain 0; scale 1 if that is all it contains."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = float(np.float32((high - low) / STEPS)) or 1.0
        return cls(scale, int(np.clip(np.rint(-low / scale), 0, STEPS)))

    def rounded(self, editor: NodeEditor, value: ir.Value, name: str) -> ir.Value:
        """A float32 value, rounded in this range; all its readers share the nodes.

        The constants are called `{name}.input_scale` and `{name}.input_zero`.
        """
        known = [node.outputs[0] for node, at in value.uses() if node.op_type == "QuantizeLinear" and at == 0]
        if known:
            return next(node.outputs[0] for node, _ in known[0].uses())
        scale = constant(editor.graph, f"{name}.input_scale", np.array(self.scale, np.float32))
        zero = constant(editor.graph, f"{name}.input_zero", np.array(self.zero, np.uint8))
        return editor.one("DequantizeLinear", [editor.one("QuantizeLinear", [value, scale, zero]), scale, zero])
