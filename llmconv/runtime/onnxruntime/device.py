"""Device: the memory in which an execution provider computes, and how arrays get there and back."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort

from llmconv.tensors import Array

HOST = "cpu"
"""onnxruntime's name of the host's memory."""

MEMORY = {
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
}
"""onnxruntime's name of a provider's memory. Values of other providers are passed in the host's memory."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

TENSOR_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(double)": np.float64,
    "tensor(int8)": np.int8,
}
"""numpy types by onnxruntime's names."""

INPUT_DTYPES = {
    **TENSOR_DTYPES,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
"""The same for inputs."""


@dataclass(frozen=True)
class Device:
    """The memory in which a provider computes.

    Attributes:
        memory: onnxruntime's name of it: `cpu` or `cuda`.
        index: number of the device.
        copies: onnxruntime copies what is bound once, when it is bound: memory that the host changes later, or that
            another run has written, has to be bound again.
    """

    memory: str = HOST
    index: int = 0
    copies: bool = False

    @classmethod
    def of(cls, provider: str, options: Mapping[str, Any]) -> Device:
        """The device of a provider, by onnxruntime's name and the option `device_id`."""
        memory = MEMORY.get(provider, HOST)
        index = int(options.get("device_id", 0)) if memory != HOST else 0
        return cls(memory, index, copies=provider != "CPUExecutionProvider")

    def place(self, array: Array) -> ort.OrtValue:
        """A copy of an array in this memory; onnxruntime frees it when neither a value nor an array refers to it."""
        array = np.ascontiguousarray(array)
        bits = array.view(np.uint16) if array.dtype == BFLOAT16 else array
        kind = onnx.TensorProto.BFLOAT16 if array.dtype == BFLOAT16 else array.dtype
        value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, kind, self.memory, self.index)
        if array.size:
            value.update_inplace(bits)
        return value


def host_value(array: Array) -> ort.OrtValue:
    """A contiguous array as a value on the same memory, which is valid as long as that array exists."""
    if array.dtype != BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)


def as_array(value: ort.OrtValue) -> Array:
    """A value of any device as an array; onnxruntime itself has none for bfloat16."""
    if value.element_type() != onnx.TensorProto.BFLOAT16:
        array: Array = value.numpy()
        return array
    held = ort.OrtValue.ortvalue_from_shape_and_type(value.shape(), onnx.TensorProto.BFLOAT16)
    if not held.tensor_size_in_bytes():
        return np.empty(value.shape(), BFLOAT16)
    held.update_inplace(value)
    content = (ctypes.c_char * held.tensor_size_in_bytes()).from_address(held.data_ptr())
    return np.frombuffer(bytearray(content), BFLOAT16).reshape(value.shape())
