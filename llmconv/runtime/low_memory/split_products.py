"""Splits products with large matrices of a graph into products with blocks of their rows, which fit into memory.

The columns of a product are independent of each other, so the numbers are those of the whole product, up to the order
in which a kernel sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx
from onnx import helper

from llmconv.runtime.onnxruntime.guard import external_fields, is_external

FLOAT_BYTES = 4


@dataclass(frozen=True)
class _Product:
    """A `Gemm` with a stored matrix [rows, columns], which a `Cast` may convert first."""

    node: onnx.NodeProto
    cast: onnx.NodeProto | None
    matrix: onnx.TensorProto


def split_products(model: onnx.ModelProto, limit: int) -> None:
    """Splits the products with larger matrices in place.

    Args:
        model: the graph without its weights.
        limit: maximum size of a matrix in bytes of float32.
    """
    products = {product.node.output[0]: product for product in _products(model) if _size(product.matrix) > limit}
    if not products:
        return
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        product = products.get(node.output[0]) if node.output else None
        nodes += _split(model.graph, product, limit) if product else [node]
    used = {name for node in nodes for name in node.input}
    dropped = {product.cast.output[0] for product in products.values() if product.cast}
    kept = [node for node in nodes if not (node.output and node.output[0] in dropped - used)]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _size(tensor: onnx.TensorProto) -> int:
    return int(tensor.dims[0] * tensor.dims[1] * FLOAT_BYTES)


def _products(model: onnx.ModelProto) -> Iterator[_Product]:
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    casts = {node.output[0]: node for node in model.graph.node if node.op_type == "Cast" and node.input[0] in stored}
    for node in model.graph.node:
        if node.op_type != "Gemm" or node.domain or len(node.input) != 2 or not _is_transposed(node):
            continue
        cast = casts.get(node.input[1])
        matrix = stored.get(cast.input[0] if cast else node.input[1])
        if matrix is not None and len(matrix.dims) == 2 and is_external(matrix):
            yield _Product(node, cast, matrix)


def _is_transposed(node: onnx.NodeProto) -> bool:
    attributes: Mapping[str, onnx.AttributeProto] = {attribute.name: attribute for attribute in node.attribute}
    return "transB" in attributes and attributes["transB"].i == 1


def _split(graph: onnx.GraphProto, product: _Product, limit: int) -> list[onnx.NodeProto]:
    """The products with blocks of rows, and the concatenation of their results."""
    rows, columns = product.matrix.dims
    step = max(1, limit // (columns * FLOAT_BYTES))
    nodes: list[onnx.NodeProto] = []
    results: list[str] = []
    for start in range(0, rows, step):
        block = _rows(product.matrix, start, min(start + step, rows))
        graph.initializer.append(block)
        matrix = block.name
        if product.cast:
            nodes.append(_copy(product.cast, [block.name], f"{block.name}:cast"))
            matrix = nodes[-1].output[0]
        nodes.append(_copy(product.node, [product.node.input[0], matrix], f"{product.node.output[0]}:{start}"))
        results.append(nodes[-1].output[0])
    return [
        *nodes,
        helper.make_node("Concat", results, [product.node.output[0]], f"{product.node.name}/Concat", axis=1),
    ]


def _copy(node: onnx.NodeProto, inputs: list[str], output: str) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.input[:], copy.output[:]
    copy.input.extend(inputs)
    copy.output.append(output)
    copy.name = f"{node.name}:{output}"
    return copy


def _rows(matrix: onnx.TensorProto, start: int, stop: int) -> onnx.TensorProto:
    """Rows `start:stop` of a matrix, as another range of its file."""
    fields = external_fields(matrix)
    row = int(fields["length"]) // matrix.dims[0]
    fields |= {"offset": str(int(fields.get("offset", 0)) + start * row), "length": str((stop - start) * row)}
    block = onnx.TensorProto(name=f"{matrix.name}[{start}:{stop}]", data_type=matrix.data_type)
    block.dims.extend([stop - start, matrix.dims[1]])
    block.data_location = onnx.TensorProto.EXTERNAL
    for key, value in fields.items():
        block.external_data.add(key=key, value=value)
    return block
