"""Half-precision graphs made of float32 ones, as exporters of half-precision models make them.

Norms and rotary angles are computed in float32 there, as transformers computes them; all else, weights included, is
float16 or bfloat16.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from llmconv.files.safetensors_file import read_header
from llmconv.runtime.onnxruntime.session_settings import HALF_PRECISION
from llmconv.tensors import Array
from llmconv.verify.other_exporters.half_precision import NUMPY

IN_FLOAT32 = re.compile(r"norm|rotary_emb")
MOST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}


def to_half(source: Path, target: Path, dtype: str) -> Path:
    """A float32 graph in half precision, its weights inside."""
    model = _Conversion(onnx.load(source), dtype).run()
    target.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, target)
    return target


def round_weights(folder: Path, dtype: str) -> None:
    """Rounds the weights of a float32 folder in place."""
    for tensor in read_header(folder / "model.safetensors").tensors.values():
        values = tensor.read().astype(NUMPY[dtype]).astype(np.float32)
        with open(tensor.path, "r+b") as file:
            file.seek(tensor.offset)
            file.write(values.tobytes())


class _Conversion:
    """One graph: every float value is either half, or float32 where a node of `IN_FLOAT32` made it."""

    def __init__(self, model: onnx.ModelProto, dtype: str) -> None:
        self._model, self._dtype, self._half = model, dtype, HALF_PRECISION[dtype]
        graph = shape_inference.infer_shapes(model).graph
        ports = [*graph.input, *graph.output, *graph.value_info]
        self._floats = {port.name for port in ports if port.type.tensor_type.elem_type == TensorProto.FLOAT}
        weights = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
        self._floats |= weights
        self._wide = {name for name in weights if not name.endswith((".weight", ".bias"))}
        self._casts: dict[tuple[str, bool], str] = {}
        self._nodes: list[onnx.NodeProto] = []

    def run(self) -> onnx.ModelProto:
        """The same model, changed."""
        graph = self._model.graph
        for node in graph.node:
            self._convert(node)
        for port in graph.output:
            if port.name in self._wide:
                raise AssertionError(f"{port.name} is computed in float32")
        for port in [*graph.input, *graph.output]:
            if port.name in self._floats:
                port.type.tensor_type.elem_type = self._half
        for tensor in graph.initializer:
            if tensor.name in self._floats - self._wide:
                tensor.CopyFrom(numpy_helper.from_array(self._rounded(numpy_helper.to_array(tensor)), tensor.name))
        del graph.node[:], graph.value_info[:]
        graph.node.extend(self._nodes)
        return self._model

    def _rounded(self, values: Array) -> Array:
        limited = np.clip(values, -MOST[self._dtype], MOST[self._dtype])
        rounded: Array = limited.astype(NUMPY[self._dtype])
        return rounded

    def _convert(self, node: onnx.NodeProto) -> None:
        wide = self._is_wide(node)
        new = onnx.NodeProto.FromString(node.SerializeToString())
        new.input[:] = [self._as(name, wide) if name in self._floats else name for name in node.input]
        if wide:
            self._wide |= set(node.output) & self._floats
        for attribute in new.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT and not wide:
                attribute.i = self._half
        self._nodes.append(new)

    def _is_wide(self, node: onnx.NodeProto) -> bool:
        """Whether a node computes in float32; what a mutant puts in front of one does, too."""
        if node.name.startswith("mutant"):
            readers = [other for other in self._model.graph.node if set(node.output) & set(other.input)]
            return bool(readers) and all(self._is_wide(reader) for reader in readers)
        return bool(IN_FLOAT32.search(node.name)) and node.op_type != "LayerNormalization"

    def _as(self, name: str, wide: bool) -> str:
        """A value in the precision that a node wants."""
        if (name in self._wide) == wide:
            return name
        if (name, wide) not in self._casts:
            cast = f"{name}:{'float32' if wide else self._dtype}"
            to = TensorProto.FLOAT if wide else self._half
            self._nodes.append(helper.make_node("Cast", [name], [cast], name=cast, to=to))
            self._casts[name, wide] = cast
        return self._casts[name, wide]
