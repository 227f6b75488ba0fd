"""Initializers -> bytes in the safetensors files: a graph maps the weights where they lie and copies none.

An ONNX initializer may point at any byte range of a file beside the graph (`location`, `offset`, `length`), and the
data of a safetensors file are raw little-endian rows. Weights stored in half precision are cast inside the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NoReturn

import onnx_ir as ir

from llmconv.errors import InputRefused
from llmconv.export.traced_graph import TracedGraph, static_shape
from llmconv.export.weights.experts import expand_experts
from llmconv.export.weights.parameter_sources import Expression, expressions, leaves
from llmconv.export.weights.stored_values import ONNX_TYPES, StoredValues
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import LazyTensor

BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.rope.freqs")
"""Tensors older checkpoints hold although the model computes them; a graph does not need them."""


def match_weights(traced: TracedGraph, tensors: Mapping[str, LazyTensor]) -> dict[str, Expression]:
    """What each weight of the graph is made of, by parameter name (tied parameters share one).

    Args:
        traced: the graph.
        tensors: the checkpoint's; those that are not the graph's own are let be.

    Raises:
        InputRefused: a weight has no tensor or another shape, or a tensor belongs to no weight.
    """
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(traced.own)}
    shapes = {name: static_shape(value) for name, value in traced.weights.items()}
    wanted = {**shapes, **{tied: shapes[name] for name, tied in traced.tied.items() if name in shapes}}
    stored = {name: tensor.shape for name, tensor in own.items()}
    found = expressions({**wanted, **traced.unused}, stored, traced.transforms, traced.base_prefix)
    matches = {name: _require(name, found, traced) for name in traced.weights}
    for name, expression in matches.items():
        _require_shape(name, expression, shapes[name])
        for source in leaves(expression):
            _require_dtype(source.name, own[source.name])
    known = {leaf.name for expression in found.values() for leaf in leaves(expression)}
    _require_all_used([name for name in own if not _is_ignored(name, traced)], known)
    return matches


def bind(traced: TracedGraph, tensors: Mapping[str, FileTensor]) -> None:
    """Points every weight input of the graph at its tensor.

    Args:
        traced: the graph; its weight inputs become initializers.
        tensors: the checkpoint's tensors by name, in files that will lie beside the graph.

    Raises:
        InputRefused: see `match_weights`.
    """
    graph = traced.model.graph
    matches = match_weights(traced, tensors)
    reader = StoredValues(graph, tensors)
    expand_experts(traced.model, {traced.weights[name]: made for name, made in matches.items()}, reader.value)
    for name, expression in matches.items():
        if traced.weights[name].uses():
            traced.weights[name].replace_all_uses_with(reader.value(expression))
    weights = set(traced.weights.values())
    inputs = [value for value in graph.inputs if value not in weights]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.sort()


def mapped_bytes(graphs: Iterable[TracedGraph]) -> int:
    """Bytes of the files that bound graphs map, each once however many graphs and weights share it."""
    ranges = {
        (str(tensor.location), tensor.offset or 0, (tensor.offset or 0) + tensor.nbytes)
        for traced in graphs
        for value in traced.model.graph.initializers.values()
        if isinstance(tensor := value.const_value, ir.ExternalTensor)
    }
    total, place, end = 0, "", 0
    for file, first, stop in sorted(ranges):
        start = first if file != place else max(first, end)
        total += max(stop - start, 0)
        place, end = file, stop if file != place else max(stop, end)
    return total


def _require(name: str, found: Mapping[str, Expression], traced: TracedGraph) -> Expression:
    """What a parameter is made of: first the one it is tied to, then its own."""
    for spelling in (traced.tied.get(name), name):
        if spelling is not None and spelling in found:
            return found[spelling]
    raise InputRefused(
        f"the weights lack `{name}`",
        hint="the folder does not hold the model its `config.json` describes; convert it again",
    )


def _require_shape(name: str, expression: Expression, expected: tuple[int, ...]) -> None:
    if expression.shape != expected:
        stored = next(iter(leaves(expression))).name
        raise InputRefused(
            f"`{stored}` gives `{name}` the shape {list(expression.shape)}, `config.json` implies {list(expected)}",
            hint="the weights and the config are of different models",
        )


def _require_dtype(name: str, tensor: LazyTensor) -> None:
    if tensor.dtype.name not in ONNX_TYPES:
        _refuse_dtype(name, tensor)


def _refuse_dtype(name: str, tensor: LazyTensor) -> NoReturn:
    raise InputRefused(
        f"`{name}` is stored as {tensor.dtype.name}",
        hint=f"store it as one of {', '.join(ONNX_TYPES)}: `--dtype float32 -o OUT`",
    )


def _is_ignored(name: str, traced: TracedGraph) -> bool:
    return any(re.search(pattern, name) for pattern in traced.ignored)


def _require_all_used(tensors: Iterable[str], used: set[str]) -> None:
    left = [name for name in tensors if name not in used and not name.endswith(BUFFERS)]
    if left:
        listed = ", ".join(f"`{name}`" for name in left[:5])
        raise InputRefused(
            f"{len(left)} tensors of the checkpoint belong to no weight of the model: {listed}",
            hint="`config.json` describes another model, or another number of layers",
        )
