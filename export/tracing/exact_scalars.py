"""Records the exact numbers behind half-precision constants of a graph.

torch multiplies a float16 tensor by 0.7071 exactly and rounds the product; the exporter rounds the number. A copy of
the graph in float32, as `verify` makes, needs the number itself. So the constant gets it as metadata, in ONNX's
`TensorProto.metadata_props`, which runtimes ignore.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from torch.utils import _pytree

from llmconv.runtime.onnxruntime.float32_graph import EXACT
from llmconv.tensors import Array

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def record_exact_scalars(model: ir.Model, program: Any) -> None:
    """Adds the numbers to the constants, in place.

    Args:
        model: the exported graph, optimized.
        program: the `torch.export.ExportedProgram` that it was made of.
    """
    scalars = np.array(sorted(set(_scalars(program))), dtype=np.float64)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in HALVES and tensor.size == 1:
            number = _exact(tensor.numpy().reshape(()), scalars)
            if number is not None:
                tensor.metadata_props[EXACT] = repr(number)


def _scalars(program: Any) -> Iterator[float]:
    """The Python numbers with which the program computes."""
    for node in program.graph.nodes:
        for given in _pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(given, float):
                yield given


def _exact(stored: Array, scalars: Array) -> float | None:
    """The only number whose rounding is stored; None if that is the stored number itself, or none or several are."""
    with np.errstate(over="ignore"):
        found = scalars[scalars.astype(stored.dtype) == stored]
    return float(found[0]) if len(found) == 1 and float(found[0]) != float(stored) else None
