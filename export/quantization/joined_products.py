"""Products of one activation as one product, over codes that lie side by side in the file: q, k, v; gate, up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import onnx_ir as ir

from llmconv.export.node_editor import MICROSOFT, NodeEditor, integers, replace_value
from llmconv.export.quantization.quantized_tensor import CODES, SCALES, ZEROS

LEFT, BIAS = 0, 5
"""Indices of inputs of `MatMulNBits`; between them are codes, scales and zero points."""

Stored = TypeVar("Stored")


def side_by_side(tensors: Mapping[str, Stored], groups: Sequence[Sequence[str]]) -> dict[str, Stored]:
    """The tensors of a file, ordered so that each group's codes are adjacent, then its zero points, then its scales.

    A group is the names of weights that are multiplied with one activation.
    """
    blocks = [[name + suffix for suffix in (CODES, ZEROS, SCALES) for name in group] for group in groups]
    block_of = {name: [one for one in block if one in tensors] for block in blocks for name in block}
    order = dict.fromkeys(one for name in tensors for one in block_of.get(name, [name]))
    return {name: tensors[name] for name in order}


def join_products(graph: ir.Graph) -> None:
    """Joins `MatMulNBits` of one activation and format whose codes, scales and zero points are adjacent, in place.

    The replaced nodes remain, unused.
    """
    alike = defaultdict[tuple[object, ...], list[ir.Node]](list)
    for node in graph:
        if (node.domain, node.op_type) == (MICROSOFT, "MatMulNBits") and _tensors(node):
            alike[_format(node)].append(node)
    for nodes in alike.values():
        for run in _adjacent_runs(nodes):
            if len(run) > 1:
                _join(graph, run)


def _format(node: ir.Node) -> tuple[object, ...]:
    """What products that can be joined have in common."""
    sizes = {name: found.value for name, found in node.attributes.items() if name != "N"}
    kinds = [(tensor.dtype, tuple(tensor.shape[1:])) for tensor in _tensors(node)]
    return node.inputs[LEFT], tuple(sorted(sizes.items())), tuple(kinds), _bias(node) is None


def _tensors(node: ir.Node) -> list[ir.ExternalTensor]:
    """Codes, scales and zero points; empty if one is not mapped from a file, or is of a module that layers share."""
    values = [value for value in node.inputs[LEFT + 1 : BIAS] if value is not None]
    found = [value.const_value for value in values if len(value.uses()) == 1]
    mapped = [tensor for tensor in found if isinstance(tensor, ir.ExternalTensor)]
    return mapped if len(mapped) == len(values) else []


def _bias(node: ir.Node) -> ir.Value | None:
    return _input(node, BIAS)


def _input(node: ir.Node, index: int) -> ir.Value | None:
    """None for an optional input that is left out, at the end of the list as within it."""
    return node.inputs[index] if len(node.inputs) > index else None


def _adjacent_runs(nodes: Sequence[ir.Node]) -> Iterator[list[ir.Node]]:
    """The products in the order of their codes, cut where the next one's are elsewhere."""
    run: list[ir.Node] = []
    for node in sorted(nodes, key=lambda node: (str(_tensors(node)[0].location), _tensors(node)[0].offset or 0)):
        if run and not _follows(run[-1], node):
            yield run
            run = []
        run.append(node)
    yield run


def _follows(one: ir.Node, other: ir.Node) -> bool:
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return all(a.location == b.location and (a.offset or 0) + a.nbytes == b.offset for a, b in pairs)


def _join(graph: ir.Graph, run: Sequence[ir.Node]) -> None:
    """One product for the rows of all, and a `Split` of its result."""
    first = next(node for node in graph if node in run)
    editor = NodeEditor(graph, first, (run[0].name or "").rpartition("/")[0] + "/joined", module_of=run[0])
    counts = [node.attributes.get_int("N", 0) for node in run]
    inputs = [run[0].inputs[LEFT], *(_joined(graph, [_input(node, at) for node in run]) for at in (1, 2, 3))]
    biases = [bias for node in run if (bias := _bias(node)) is not None]
    if biases:
        inputs += [None, editor.one("Concat", biases, {"axis": 0})]
    fields = {name: found.value for name, found in run[0].attributes.items()} | {"N": sum(counts)}
    given = inputs if inputs[-1] is not None else inputs[:-1]
    product = editor.one("MatMulNBits", given, fields, domain=MICROSOFT)
    parts = editor.add("Split", [product, integers(graph, *counts)], {"axis": -1}, outputs=len(run))
    for node, part in zip(run, parts, strict=True):
        replace_value(node.outputs[0], part)


def _joined(graph: ir.Graph, values: Sequence[ir.Value | None]) -> ir.Value | None:
    """One initializer over adjacent bytes; None for an input that all products leave out."""
    tensors = [value.const_value for value in values if value is not None]
    mapped = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    if not mapped:
        return None
    name = "+".join(str(tensor.name) for tensor in mapped)
    rows = sum(tensor.shape.numpy()[0] for tensor in mapped)
    shape = ir.Shape((rows, *mapped[0].shape[1:]))
    place = mapped[0].location, mapped[0].offset, sum(tensor.nbytes for tensor in mapped)
    content = ir.ExternalTensor(*place, mapped[0].dtype, shape=shape, name=name)
    graph.initializers[name] = ir.val(name, mapped[0].dtype, shape, const_value=content)
    return graph.initializers[name]
