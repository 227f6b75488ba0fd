"""Constants: the constant values of a graph; integers of less than a byte are unpacked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from llmconv.files.safetensors_file import read_exactly
from llmconv.runtime.onnxruntime.guard import external_fields, nodes
from llmconv.tensors import Array
from llmconv.verify.audit.weights import initializer_values

SUB_BYTE = {
    name: (bits, name.startswith("INT"))
    for name, bits in (("UINT4", 4), ("INT4", 4), ("UINT2", 2), ("INT2", 2))
    if hasattr(TensorProto, name)
}
"""Element types of less than a byte: number of bits, and whether they are signed."""

RESHAPING = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
"""Operators that keep the order of elements."""
HALF = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
DEPTH = 8


class Constants:
    """Initializers and `Constant` nodes of a graph, possibly reshaped; makers and users of each value."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self._folder = folder
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers: dict[str, onnx.NodeProto] = {}
        self.users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in nodes(model):
            self.makers.update((name, node) for name in node.output)
            for name in node.input:
                self.users[name].append(node)

    def initializer(self, name: str) -> str:
        """The initializer of a value, possibly in another shape, or half precision that is widened; empty for none."""
        for _ in range(DEPTH):
            if name in self._tensors:
                return name
            maker = self.makers.get(name)
            if maker is None or not (maker.op_type in RESHAPING or self._is_widened(maker)):
                return ""
            name = maker.input[0]
        return ""

    def _is_widened(self, node: onnx.NodeProto) -> bool:
        """Whether a node casts an initializer of half precision to float32, which changes no value."""
        stored = self._tensors.get(node.input[0]) if node.op_type == "Cast" else None
        return stored is not None and stored.data_type in HALF and node.attribute[0].i == TensorProto.FLOAT

    def array(self, name: str) -> Array | None:
        """A constant in its stored shape, integers of 4 or 2 bits as int8 or uint8; None if it is not constant."""
        if initializer := self.initializer(name):
            return self._read(self._tensors[initializer])
        maker = self.makers.get(name)
        if maker is not None and maker.op_type == "Constant":
            value = next((attribute.t for attribute in maker.attribute if attribute.name == "value"), None)
            return None if value is None else numpy_helper.to_array(value)
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the initializer of a value."""
        return tuple(self._tensors[self.initializer(name)].dims)

    def after(self, name: str) -> Iterator[onnx.NodeProto]:
        """The nodes that use a value, directly or after it was reshaped, transposed or cast."""
        waiting, seen = [name], set()
        while waiting:
            for node in self.users.get(waiting.pop(), []):
                if node.op_type in {*RESHAPING, "Transpose", "Cast"} and node.output[0] not in seen:
                    seen.add(node.output[0])
                    waiting.append(node.output[0])
                else:
                    yield node

    def _read(self, tensor: onnx.TensorProto) -> Array | None:
        bits, signed = SUB_BYTE.get(TensorProto.DataType.Name(tensor.data_type), (0, False))
        if not bits:
            return initializer_values(tensor, self._folder)
        dtype, fields = np.int8 if signed else np.uint8, external_fields(tensor)
        if not fields:
            return numpy_helper.to_array(tensor).astype(dtype)
        count = int(np.prod(tensor.dims, dtype=np.int64))
        raw = np.empty(-(-count * bits // 8), dtype=np.uint8)
        path = self._folder / fields["location"]
        with open(path, "rb", buffering=0) as file:
            read_exactly(file.fileno(), raw.data, int(fields.get("offset", 0)), path)
        codes = unpacked(raw, bits)[:count].reshape(tuple(tensor.dims))
        return (codes.astype(np.int8) ^ (1 << bits - 1)) - np.int8(1 << bits - 1) if signed else codes


def unpacked(raw: Array, bits: int) -> Array:
    """Codes of `bits` bits from bytes, along the last axis, low bits first (onnx.proto, `UINT4`)."""
    if bits == 8:
        return raw
    places = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (raw[..., None] >> places) & np.uint8((1 << bits) - 1)
    return codes.reshape(*raw.shape[:-1], -1)
