"""Initializers -> bytes in the safetensors files: a graph maps the weights where they lie and copies none.

An ONNX initializer may point at any byte range of a file beside the graph (`location`, `offset`, `length`), and the
data of a safetensors file are raw little-endian rows. Weights stored in half precision are cast inside the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import onnx_ir as ir

from llmconv.errors import InputRefused
from llmconv.export.gemm import static_shape
from llmconv.export.trace import TracedGraph
from llmconv.safetensors_io import FileTensor
from llmconv.tensors import LazyTensor

ONNX_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}

BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.rope.freqs")
"""Tensors older checkpoints hold although the model computes them; a graph does not need them."""


def match_weights(
    traced: TracedGraph, tensors: Mapping[str, LazyTensor], prefixes: Sequence[str] = ()
) -> dict[str, str]:
    """Which tensor each weight of the graph is: parameter name -> checkpoint name (tied parameters share one).

    Args:
        traced: the graph.
        tensors: the checkpoint's.
        prefixes: of a multi-modal checkpoint, what stands before the language model's names; other tensors are let be.

    Raises:
        InputRefused: a weight has no tensor or another shape, or a tensor belongs to no weight.
    """
    matches = {name: _resolve(name, traced, tensors, prefixes) for name in traced.weights}
    for name, source in matches.items():
        _require_shape(source, tensors[source], traced.weights[name])
    if not prefixes:
        _require_all_used(tensors, set(matches.values()) | set(traced.tied))
    return matches


def bind(traced: TracedGraph, tensors: Mapping[str, FileTensor], prefixes: Sequence[str] = ()) -> int:
    """Points every weight input of the graph at its tensor; returns how many bytes are mapped.

    Args:
        traced: the graph; its weight inputs become initializers.
        tensors: the checkpoint's tensors by name, in files that will lie beside the graph.
        prefixes: see `match_weights`.

    Raises:
        InputRefused: see `match_weights`.
    """
    graph = traced.model.graph
    read: dict[str, ir.Value] = {}
    for name, source in match_weights(traced, tensors, prefixes).items():
        if source not in read:
            read[source] = _initializer(graph, traced.weights[name], source, tensors[source])
        traced.weights[name].replace_all_uses_with(read[source])
    weights = set(traced.weights.values())
    inputs = [value for value in graph.inputs if value not in weights]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    return sum(tensors[name].nbytes for name in read)


def require_language_model_used(tensors: Iterable[str], used: set[str], prefixes: Sequence[str]) -> None:
    """Every tensor of a multi-modal checkpoint's language model must be in some graph; other parts are let be.

    Raises:
        InputRefused: one is in none.
    """
    own = tuple(prefix for prefix in prefixes if any(name.startswith(prefix) for name in used))
    _require_all_used([name for name in tensors if name.startswith(own) and not name.endswith("lm_head.weight")], used)


def _resolve(name: str, traced: TracedGraph, tensors: Mapping[str, LazyTensor], prefixes: Sequence[str]) -> str:
    """The checkpoint's name of a parameter: its own, without the inner model's name, or that of the tied parameter."""
    for candidate in _candidates(name, traced, prefixes):
        if candidate in tensors:
            return candidate
    raise InputRefused(
        f"the weights lack `{name}`",
        hint="the folder does not hold the model its `config.json` describes; convert it again",
    )


def _candidates(name: str, traced: TracedGraph, prefixes: Sequence[str]) -> Iterable[str]:
    for spelling in (traced.tied.get(name), name):
        if spelling is not None:
            yield spelling
            yield spelling.removeprefix(f"{traced.base_prefix}.")
            yield f"{traced.base_prefix}.{spelling}"
            for prefix in prefixes:
                yield f"{prefix}{spelling}"
                yield f"{prefix}{spelling.removeprefix(f'{traced.base_prefix}.')}"


def _require_shape(name: str, tensor: LazyTensor, value: ir.Value) -> None:
    expected = static_shape(value)
    if tensor.shape != expected:
        raise InputRefused(
            f"`{name}` has shape {list(tensor.shape)}, `config.json` implies {list(expected)}",
            hint="the weights and the config are of different models",
        )
    if tensor.dtype.name not in ONNX_TYPES:
        _refuse_dtype(name, tensor)


def _refuse_dtype(name: str, tensor: LazyTensor) -> NoReturn:
    raise InputRefused(
        f"`{name}` is stored as {tensor.dtype.name}",
        hint=f"store it as one of {', '.join(ONNX_TYPES)}: `--dtype float32 -o OUT`",
    )


def _initializer(graph: ir.Graph, like: ir.Value, name: str, tensor: FileTensor) -> ir.Value:
    """The initializer `name` over the tensor's bytes; returns the float32 value that the graph reads."""
    dtype = ONNX_TYPES[tensor.dtype.name]
    stored = ir.Value(name=name, shape=like.shape, type=ir.TensorType(dtype))
    stored.const_value = ir.ExternalTensor(
        tensor.path.name, tensor.offset, tensor.nbytes, dtype, shape=ir.Shape(tensor.shape), name=name
    )
    graph.initializers[name] = stored
    if dtype == ir.DataType.FLOAT:
        return stored
    cast = ir.node("Cast", [stored], attributes={"to": ir.DataType.FLOAT}, name=f"{name}/Cast")
    graph.insert_before(graph[0], cast)
    cast.outputs[0].name = f"{name}:float32"
    return cast.outputs[0]


def _require_all_used(tensors: Iterable[str], used: set[str]) -> None:
    left = [name for name in tensors if name not in used and not name.endswith(BUFFERS)]
    if left:
        listed = ", ".join(f"`{name}`" for name in left[:5])
        raise InputRefused(
            f"{len(left)} tensors of the checkpoint belong to no weight of the model: {listed}",
            hint="`config.json` describes another model, or another number of layers",
        )
