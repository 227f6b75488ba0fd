"""Initializers -> bytes in the safetensors files: a graph maps the weights where they lie and copies none.

An ONNX initializer may point at any byte range of a file beside the graph (`location`, `offset`, `length`), and the data of
a safetensors file are raw little-endian rows. Weights stored in half precision are cast to float32 inside the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn

import onnx_ir as ir

from llmconv.errors import InputRefused
from llmconv.export.trace import TracedGraph
from llmconv.safetensors_io import FileTensor

ONNX_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}

BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.rope.freqs")
"""Tensors older checkpoints hold although the model computes them; a graph does not need them."""


def bind(traced: TracedGraph, tensors: Mapping[str, FileTensor]) -> int:
    """Points every weight input of the graph at its tensor; returns how many bytes are mapped.

    Args:
        traced: the graph; its weight inputs become initializers.
        tensors: the checkpoint's tensors by name, in files beside the graph.

    Raises:
        InputRefused: a weight has no tensor or another shape, or a tensor belongs to no weight.
    """
    used: dict[str, ir.Value] = {}
    for name, value in traced.weights.items():
        source = _resolve(name, traced, tensors)
        _require_shape(source, tensors[source], value)
        if source in used:
            value.replace_all_uses_with(used[source])
        else:
            used[source] = _initializer(traced.model.graph, value, source, tensors[source])
    weights = set(traced.weights.values())
    inputs = [value for value in traced.model.graph.inputs if value not in weights]
    traced.model.graph.inputs.clear()
    traced.model.graph.inputs.extend(inputs)
    _require_all_used(tensors, used, traced)
    return sum(tensors[name].nbytes for name in used)


def _resolve(name: str, traced: TracedGraph, tensors: Mapping[str, FileTensor]) -> str:
    """The checkpoint's name of a parameter: its own, without the inner model's name, or that of the tied parameter."""
    for candidate in _candidates(name, traced):
        if candidate in tensors:
            return candidate
    raise InputRefused(
        f"the weights lack `{name}`", hint="the folder does not hold the model its `config.json` describes; convert it again"
    )


def _candidates(name: str, traced: TracedGraph) -> Iterable[str]:
    for spelling in (traced.tied.get(name), name):
        if spelling is not None:
            yield spelling
            yield spelling.removeprefix(f"{traced.base_prefix}.")
            yield f"{traced.base_prefix}.{spelling}"


def _require_shape(name: str, tensor: FileTensor, value: ir.Value) -> None:
    assert value.shape is not None
    expected = tuple(int(size) for size in value.shape)  # type: ignore[arg-type]
    if tensor.shape != expected:
        raise InputRefused(
            f"`{name}` has shape {list(tensor.shape)}, `config.json` implies {list(expected)}",
            hint="the weights and the config are of different models",
        )
    if tensor.dtype.name not in ONNX_TYPES:
        _refuse_dtype(name, tensor)


def _refuse_dtype(name: str, tensor: FileTensor) -> NoReturn:
    raise InputRefused(
        f"`{name}` is stored as {tensor.dtype.name}", hint=f"store it as one of {', '.join(ONNX_TYPES)}: `--dtype float32 -o OUT`"
    )


def _initializer(graph: ir.Graph, value: ir.Value, name: str, tensor: FileTensor) -> ir.Value:
    """Turns the input `value` into an initializer; returns the float32 value that the graph reads."""
    dtype = ONNX_TYPES[tensor.dtype.name]
    stored = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
    stored.const_value = ir.ExternalTensor(
        tensor.path.name,
        tensor.offset,
        tensor.nbytes,
        dtype,
        shape=ir.Shape(tensor.shape),
        name=name,
        base_dir=str(tensor.path.parent),
    )
    graph.initializers[name] = stored
    if dtype == ir.DataType.FLOAT:
        read = stored
    else:
        cast = ir.node("Cast", [stored], attributes={"to": ir.DataType.FLOAT}, name=f"{name}/Cast")
        graph.insert_before(graph[0], cast)
        read = cast.outputs[0]
        read.name, read.shape, read.dtype = f"{name}:float32", value.shape, ir.DataType.FLOAT
    value.replace_all_uses_with(read)
    return read


def _require_all_used(tensors: Mapping[str, FileTensor], used: Mapping[str, ir.Value], traced: TracedGraph) -> None:
    tied = set(traced.tied)
    left = [name for name in tensors if name not in used and not name.endswith(BUFFERS) and name not in tied]
    if left:
        listed = ", ".join(f"`{name}`" for name in left[:5])
        raise InputRefused(
            f"{len(left)} tensors of the checkpoint belong to no weight of the model: {listed}",
            hint="`config.json` describes another model, or another number of layers",
        )
