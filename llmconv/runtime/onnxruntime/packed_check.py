"""Checks that a graph with packed weights from a file computes what it computed when they were packed.

onnxruntime (1.31) saves packed matrices without a word where it cannot read them back: `MatMulNBits` with codes in the
file and scales in the graph, because they are small, gives NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort

from llmconv.runtime.cache_names import MAX_LENGTH, is_present
from llmconv.runtime.onnxruntime.guard import is_external
from llmconv.runtime.onnxruntime.time_limit import LimitedSession
from llmconv.tensors import Array

DTYPES = {
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}

COUNTS = (1, 4)
"""Numbers of tokens: kernels have one way for a step and another one for a prompt."""


CAPACITY = 8
"""Length of a shared cache buffer: a decode graph counts one token more than `COUNTS`."""


def is_split(model: onnx.ModelProto) -> bool:
    """Whether a matrix product has its codes in the weights' file, and scales or zero points in the graph.

    Args:
        model: the graph without its weights.
    """
    places = {tensor.name: is_external(tensor) for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.domain == "com.microsoft" and "MatMul" in node.op_type]
    return any(len({places[name] for name in node.input[1:] if name in places}) > 1 for node in products)


def outputs_are_equal(one: LimitedSession, other: LimitedSession) -> bool:
    """Whether both sessions give the same bytes for a few tokens after an empty past."""
    names = [output.name for output in one.get_outputs() if not is_present(output.name)]  # buffers may be unset
    feeds = [_feeds(one, count) for count in COUNTS]
    return all(_bytes(one, names, values) == _bytes(other, names, values) for values in feeds)


def _bytes(session: LimitedSession, names: Sequence[str], feeds: Mapping[str, ort.OrtValue]) -> list[bytes]:
    return [value.numpy().tobytes() for value in session.run_with_ort_values(names, feeds)]


def _feeds(session: LimitedSession, count: int) -> dict[str, ort.OrtValue]:
    arrays = {value.name: _values(value.name, value.type, _shape(value.shape, count)) for value in session.get_inputs()}
    return {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}


def _shape(declared: Sequence[int | str], count: int) -> list[int]:
    """One sequence of `count` tokens, without a past."""
    return [axis if isinstance(axis, int) else _size(axis, count) for axis in declared]


def _size(axis: str, count: int) -> int:
    if axis == MAX_LENGTH:
        return CAPACITY
    return 1 if "batch" in axis else 0 if "past" in axis else count


def _values(name: str, kind: str, shape: list[int]) -> Array:
    """Tokens and positions 0, 1, …, a mask of ones, an empty past, and numbers of about 1 for states."""
    dtype = DTYPES[kind]
    if name == "attention_mask":
        return np.ones(shape, dtype)
    if name.startswith("past"):
        return np.zeros(shape, dtype)
    if not shape:
        raise ValueError(f"the shape of `{name}`, which another stage makes, is unknown: they cannot be checked")
    if np.issubdtype(dtype, np.integer):
        return np.broadcast_to(np.arange(shape[-1], dtype=dtype), shape).copy()
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)
