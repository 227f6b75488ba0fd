"""Binds the weights of a graph to byte ranges of safetensors files, which the graph maps without a copy.

An ONNX initializer may refer to any byte range of a file in the graph's folder (`location`, `offset`, `length`), and
the data of a safetensors file are raw little-endian rows. Where the graph computes in another dtype, it casts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import onnx_ir as ir

from llmconv.errors import InputRefused
from llmconv.export.node_editor import NodeEditor
from llmconv.export.traced_graph import TracedGraph, static_shape
from llmconv.export.weights.experts import dtype_of, expand_experts
from llmconv.export.weights.parameter_sources import StoredRows, WeightSource, expressions, leaves
from llmconv.export.weights.stored_values import ONNX_TYPES, StoredValues
from llmconv.files.safetensors_file import FileTensor
from llmconv.runtime.eager.stored_tensors import BUFFERS
from llmconv.tensors import LazyTensor, as_bytes


class Quantized(Protocol):
    """Writes products with quantized weights into a graph, see `quantization.products`."""

    def __contains__(self, source: WeightSource) -> bool:
        """Whether a matrix is stored as codes."""

    def multiply(self, editor: NodeEditor, left: ir.Value, rows: Any, values: StoredValues) -> ir.Value:
        """Inserts a product."""

    def rewrite(self, traced: TracedGraph, matches: Mapping[str, WeightSource], values: StoredValues) -> None:
        """Replaces the products of a graph."""


def match_weights(traced: TracedGraph, tensors: Mapping[str, LazyTensor]) -> dict[str, WeightSource]:
    """The stored tensors that each weight of the graph consists of, by parameter name (tied parameters share one).

    Tensors outside of `traced.own` are ignored.

    Raises:
        InputRefused: missing keys, unexpected keys, a shape mismatch, or an unsupported dtype.
    """
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(traced.own)}
    shapes = {name: static_shape(value) for name, value in traced.weights.items()}
    wanted = {**shapes, **{tied: shapes[name] for name, tied in traced.tied.items() if name in shapes}}
    stored = {name: tensor.shape for name, tensor in own.items()}
    found = expressions({**wanted, **traced.unused}, stored, traced.transforms, traced.base_prefix)
    matches = {name: _require(name, found, traced) for name in traced.weights}
    for name, expression in matches.items():
        require_shape(name, shapes[name], expression)
        for source in leaves(expression):
            require_dtype(source.name, own[source.name])
    known = {leaf.name for expression in found.values() for leaf in leaves(expression)}
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in traced.ignored) or "(?!)")
    _require_all_used([name for name in own if not ignored.search(name)], known)
    return matches


def require_one_copy(traced: TracedGraph, tensors: Mapping[str, LazyTensor]) -> None:
    """Raises InputRefused for stored tensors that differ where the config ties them: the graph would read only one.

    transformers 5 then ties nothing, older versions use the embedding; no graph is right for both.
    """
    own = {name: tensor.shape for name, tensor in tensors.items() if name.startswith(traced.own)}
    for name, tied in traced.tied.items():
        value = traced.weights.get(name)
        if value is None:
            continue
        wanted = dict.fromkeys((name, tied), static_shape(value))
        found = expressions(wanted, own, traced.transforms, traced.base_prefix)
        sides = [[leaf.name for leaf in leaves(expression)] for expression in found.values()]
        if [len(side) for side in sides] != [1, 1]:
            continue
        (one,), (other,) = sides
        if one != other and not _are_equal(tensors[one], tensors[other]):
            raise InputRefused(
                f"`config.json` ties `{one}` and `{other}`, and the stored weights differ",
                hint="an output head of its own has `tie_word_embeddings` false in `config.json`; else remove one",
            )


def _are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; reading stops at the first block that differs."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(as_bytes(one.rows(*block)) == as_bytes(other.rows(*block)) for block in one.blocks())


def bind(
    traced: TracedGraph,
    matches: Mapping[str, WeightSource],
    tensors: Mapping[str, FileTensor],
    rounded: Mapping[str, LazyTensor] | None = None,
    quantized: Quantized | None = None,
) -> None:
    """Turns every weight input of the graph into an initializer over the bytes of its tensors, in place.

    Args:
        traced: the graph.
        matches: from `match_weights`.
        tensors: the checkpoint's tensors by name, in files that will be in the folder of the graph.
        rounded: tensors with the dtypes to round values to first; by default values are used as stored.
        quantized: multiplies with the tensors that are stored as codes.
    """
    graph = traced.model.graph
    reader = StoredValues(graph, tensors, rounded or tensors)

    def multiply(editor: NodeEditor, left: ir.Value, matrix: WeightSource, transB: int, dtype: ir.DataType) -> ir.Value:
        if quantized and matrix in quantized:
            return quantized.multiply(editor, left, matrix, reader)
        return editor.one("Gemm", [left, reader.value(matrix, dtype)], {"transB": transB})

    expand_experts(traced.model, {traced.weights[name]: made for name, made in matches.items()}, multiply)
    if quantized:
        quantized.rewrite(traced, matches, reader)
    _forget_shapes(graph)
    multiplied = {
        expression
        for name, expression in matches.items()
        if not all(_looks_up(*use) for use in traced.weights[name].uses())
    }
    for name, expression in matches.items():
        dtype, uses = dtype_of(traced.weights[name]), tuple(traced.weights[name].uses())
        if isinstance(expression, StoredRows) and expression not in multiplied:
            for node, _ in uses:
                reader.look_up(node, expression, dtype)
        elif uses:
            traced.weights[name].replace_all_uses_with(reader.value(expression, dtype))
    weights = set(traced.weights.values())
    graph.inputs[:] = [value for value in graph.inputs if value not in weights]
    graph.sort()


def mapped_bytes(graphs: Iterable[TracedGraph]) -> int:
    """Number of bytes of weight files that bound graphs map; bytes that several weights share count once."""
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


def _looks_up(node: ir.Node, index: int) -> bool:
    """Whether a node picks rows of the table that is its input `index`; not if they are an output of the graph."""
    return node.op_type == "Gather" and not node.domain and index == 0 and not node.outputs[0].is_graph_output()


def _forget_shapes(graph: ir.Graph) -> None:
    """Removes types and shapes of inner values, which runtimes infer, from the file."""
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = value.type = None


def _require(name: str, found: Mapping[str, WeightSource], traced: TracedGraph) -> WeightSource:
    """The source of a parameter: that of the parameter it is tied to, otherwise its own."""
    for spelling in (traced.tied.get(name), name):
        if spelling is not None and spelling in found:
            return found[spelling]
    raise missing_key(name)


def require_shape(name: str, shape: tuple[int, ...], source: WeightSource) -> None:
    """Raises InputRefused if the shape of a source is not that of the parameter `name`."""
    if source.shape != shape:
        raise InputRefused(
            f"shape mismatch for `{name}`: expected {list(shape)} by `config.json`, "
            f"got {list(source.shape)} from `{next(iter(leaves(source))).name}`",
            hint="the weights and the config are of different models",
        )


def missing_key(name: str) -> InputRefused:
    """The error of a parameter that no tensor is for."""
    return InputRefused(
        f"missing keys: `{name}`",
        hint="the weights are not of the model that `config.json` describes; convert the folder again",
    )


def require_dtype(name: str, tensor: LazyTensor) -> None:
    """Refuses a tensor of a dtype that graphs cannot map."""
    if tensor.dtype.name not in ONNX_TYPES:
        raise InputRefused(
            f"`{name}` has the unsupported dtype {tensor.dtype.name}",
            hint=f"convert it to one of {', '.join(ONNX_TYPES)}: `--dtype float32 -o OUT`",
        )


def _require_all_used(tensors: Iterable[str], used: set[str]) -> None:
    left = [name for name in tensors if name not in used and not name.endswith(BUFFERS)]
    if left:
        listed = ", ".join(f"`{name}`" for name in left[:5])
        raise InputRefused(
            f"{len(left)} unexpected keys: {listed}",
            hint="`config.json` describes another model, or another number of layers",
        )
