"""WidenedWeights: float32 copies of half-precision weights, made once and shared by the sessions of different graphs.

onnxruntime folds the Cast after a weight separately in every session. Here the copies are made first, and every session
gets the same memory (`SessionOptions.add_initializer`). Prepacked weights cannot be shared: onnxruntime shares those
between sessions in C++ only (1.31).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

from llmconv.runtime.onnxruntime.guard import external_fields, is_external
from llmconv.tensors import BLOCK_BYTES, Array

STORED: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}

PRODUCTS = {"Gemm", "MatMul", "FusedMatMul", "Gather"}
"""Operators that read matrices, and are never folded, because their other input depends on the call."""

Place = tuple[Path, int, int, tuple[int, ...]]
"""File, offset, element type and shape of a stored weight."""


class WidenedWeights:
    """The copies, by the place of the stored weight; this object must outlive the sessions."""

    def __init__(self) -> None:
        self._values: dict[Place, ort.OrtValue] = {}

    def share(self, path: Path, model: onnx.ModelProto, options: ort.SessionOptions) -> None:
        """Replaces every Cast of a stored matrix to float32 by the shared copy, in place.

        Other weights are small, and onnxruntime may fold nodes that read them, for which it needs their own values.

        Args:
            path: file of the graph; its weights are in the same folder.
            model: the graph without its weights.
            options: of the session; gets the copies.
        """
        weights = {tensor.name: tensor for tensor in model.graph.initializer if _is_half(tensor)}
        uses = Counter(name for node in model.graph.node for name in node.input)
        read = Counter(name for node in model.graph.node if node.op_type in PRODUCTS for name in node.input)
        casts = [
            node
            for node in model.graph.node
            if _widens(node, weights) and uses[node.input[0]] == 1 and read[node.output[0]] == uses[node.output[0]]
        ]
        for node in casts:
            tensor = weights[node.input[0]]
            options.add_initializer(node.output[0], self._copy(path.parent, tensor))
            tensor.name, tensor.data_type = node.output[0], TensorProto.FLOAT
        replaced = {node.output[0] for node in casts}
        kept = [node for node in model.graph.node if node.output[0] not in replaced]
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
        del model.graph.node[:]
        model.graph.node.extend(nodes)

    def _copy(self, folder: Path, tensor: onnx.TensorProto) -> ort.OrtValue:
        fields = external_fields(tensor)
        place = (
            (folder / fields["location"]).resolve(),
            int(fields.get("offset") or 0),
            tensor.data_type,
            (*tensor.dims,),
        )
        if place not in self._values:
            self._values[place] = ort.OrtValue.ortvalue_from_numpy(widened(*place))
        return self._values[place]


def _is_half(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type in STORED and is_external(tensor)


def _widens(node: onnx.NodeProto, weights: dict[str, onnx.TensorProto]) -> bool:
    """Whether a node casts a stored weight to float32."""
    is_cast = node.op_type == "Cast" and not node.domain and node.input[0] in weights
    return is_cast and any(item.name == "to" and item.i == TensorProto.FLOAT for item in node.attribute)


def widened(path: Path, offset: int, kind: int, shape: tuple[int, ...]) -> Array:
    """Stored values in float32, converted in blocks, so that no more than a block is held twice.

    Args:
        path: file of the weight.
        offset: of its first byte.
        kind: its element type, `FLOAT16` or `BFLOAT16`.
        shape: its shape.
    """
    result = np.empty(shape, np.float32)
    flat, dtype = result.reshape(-1), STORED[kind]
    step = BLOCK_BYTES // dtype.itemsize
    with open(path, "rb") as file:
        file.seek(offset)
        for start in range(0, flat.size, step):
            block = flat[start : start + step]
            block[...] = np.frombuffer(file.read(block.size * dtype.itemsize), dtype)
    return result
