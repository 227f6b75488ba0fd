"""Operators of torch whose translation by torch's own exporter loses digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18 as op

from llmconv.export.library_patches import TRANSLATIONS as LIBRARY


def expm1(x: Any) -> Any:
    """`exp(x) - 1` as `tanh(x / 2) * (exp(x) + 1)`, which does not cancel near 0; torch computes it in float32."""
    half, one = (op.CastLike(op.Constant(value_float=number), x) for number in (0.5, 1.0))
    return op.Mul(op.Tanh(op.Mul(x, half)), op.Add(op.Exp(x), one))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {**LIBRARY, torch.ops.aten.expm1.default: expm1}
"""Operation of torch to a function of onnxscript: ours, and transformers' corrections."""
