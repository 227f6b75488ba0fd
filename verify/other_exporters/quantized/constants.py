"""Constants: the values in a graph that are known without running it, integers of less than a byte unpacked."""

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

SMALL = {
    name: (bits, name.startswith("INT"))
    for name, bits in (("UINT4", 4), ("INT4", 4), ("UINT2", 2), ("INT2", 2))
    if hasattr(TensorProto, name)
}
"""Element types that share bytes: bits, and whether they have a sign."""

UNCHANGED = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
"""What moves no element."""
DEPTH = 8


class Constants:
    """Initializers and `Constant` nodes of a graph, also behind operators that move no element.

    Args:
        model: without its weights.
        folder: that external data lies in.
    """

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self._folder = folder
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers: dict[str, onnx.NodeProto] = {}
        self.users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in nodes(model):
            self.makers.update((name, node) for name in node.output)
            for name in node.input:
                self.users[name].append(node)

    def home(self, name: str) -> str:
        """The initializer that a value is, in another shape perhaps; empty where it is none."""
        for _ in range(DEPTH):
            if name in self._tensors:
                return name
            maker = self.makers.get(name)
            if maker is None or maker.op_type not in UNCHANGED:
                return ""
            name = maker.input[0]
        return ""

    def array(self, name: str) -> Array | None:
        """The values in their stored shape, integers of four or two bits as int8 or uint8; None if not constant."""
        if home := self.home(name):
            return self._read(self._tensors[home])
        maker = self.makers.get(name)
        if maker is not None and maker.op_type == "Constant":
            value = next((attribute.t for attribute in maker.attribute if attribute.name == "value"), None)
            return None if value is None else numpy_helper.to_array(value)
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the initializer that a value is."""
        return tuple(self._tensors[self.home(name)].dims)

    def after(self, name: str) -> Iterator[onnx.NodeProto]:
        """What uses a value, looked for behind operators that only move its elements or cast them."""
        waiting, seen = [name], set()
        while waiting:
            for node in self.users.get(waiting.pop(), []):
                if node.op_type in {*UNCHANGED, "Transpose", "Cast"} and node.output[0] not in seen:
                    seen.add(node.output[0])
                    waiting.append(node.output[0])
                else:
                    yield node

    def _read(self, tensor: onnx.TensorProto) -> Array | None:
        bits, signed = SMALL.get(TensorProto.DataType.Name(tensor.data_type), (0, False))
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
    """Codes of `bits` bits from bytes, along the last axis, those of the low bits first (onnx.proto, `UINT4`)."""
    if bits == 8:
        return raw
    places = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (raw[..., None] >> places) & np.uint8((1 << bits) - 1)
    return codes.reshape(*raw.shape[:-1], -1)
