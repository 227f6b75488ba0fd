"""`--opset`: the same graph for older or newer runtimes; operators of opset 23 are expanded into primitive ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import onnx
import onnx_ir as ir

from llmconv.errors import UnsupportedInput
from llmconv.export.node_editor import NodeEditor, constant, integers, replace_value, scalar

TO_THE_END = (1 << 63) - 1
IR_VERSIONS = {21: 10, 23: 10, 24: 11}
"""Opset to the version of the file format that its runtimes read."""


def to_opset(model: ir.Model, opset: int) -> None:
    """Rewrites a graph for another opset, in place; UnsupportedInput for an operator that cannot be expanded."""
    for nodes in (model.graph, *model.functions.values()):
        for node in list(nodes):
            if node.domain == "" and not _exists(node.op_type, opset):
                _expand(node, opset)
    model.opset_imports[""] = opset
    model.ir_version = IR_VERSIONS[opset]
    for function in model.functions.values():
        function.opset_imports[""] = opset


def _exists(op_type: str, opset: int) -> bool:
    try:
        onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return True


def _expand(node: ir.Node, opset: int) -> None:
    expand = _EXPANSIONS.get(node.op_type)
    if expand is None or not isinstance(node.graph, ir.Graph):
        _refuse(node, f"has no equivalent in opset {opset}")
    replace_value(node.outputs[0], expand(NodeEditor(node.graph, node, node.name or node.op_type), node))
    node.graph.remove(node, safe=True)


def _attention(edit: NodeEditor, node: ir.Node) -> ir.Value:
    """Attention-23: `softmax(softcap(scale * q @ k^T) + mask) @ v`.

    Query heads that share a key/value head are joined along the tokens, so that keys and values need not be repeated:
    `[batch, heads, new, size]` and `[batch, kv_heads, heads / kv_heads * new, size]` have the same memory layout.
    """
    query, key, value, mask = _plain_attention(node)
    per_key = edit.one("Shape", [key], {"start": 0, "end": 2})
    per_query = edit.one("Shape", [query], {"start": 0, "end": 3})
    size = edit.one("Shape", [query], {"start": 3, "end": 4})
    total = edit.one("Shape", [key], {"start": 2, "end": 3})
    rest = integers(edit.graph, -1)

    def reshaped(content: ir.Value, *sizes: ir.Value) -> ir.Value:
        return edit.one("Reshape", [content, edit.one("Concat", sizes, {"axis": 0})])

    grouped = reshaped(query, per_key, rest, size)
    scale = node.attributes.get_float("scale", 0.0)
    if half := _half(node):  # scaled first, since products that are not may be too large for float16
        factor = constant(edit.graph, f"{half.name.lower()}_{scale!r}", np.array(scale, half.numpy()))
        grouped = edit.one("Mul", [grouped, factor])
    scores = edit.one("MatMul", [grouped, edit.one("Transpose", [key], {"perm": [0, 1, 3, 2]})])
    if half:
        scores, mask = (edit.one("Cast", [value], {"to": ir.DataType.FLOAT}) for value in (scores, mask))
    else:
        scores = edit.one("Mul", [scores, scalar(edit.graph, scale)])
    scores = reshaped(scores, per_query, rest)
    softcap = node.attributes.get_float("softcap", 0.0)
    if softcap:
        cap = scalar(edit.graph, softcap)
        scores = edit.one("Mul", [edit.one("Tanh", [edit.one("Div", [scores, cap])]), cap])
    weights = edit.one("Softmax", [edit.one("Add", [scores, mask])], {"axis": -1})
    weights = edit.one("Cast", [weights], {"to": half}) if half else weights
    mixed = edit.one("MatMul", [reshaped(weights, per_key, rest, total), value])
    return reshaped(mixed, per_query, rest)


def _half(node: ir.Node) -> ir.DataType | None:
    """The dtype of a node that computes in half precision and, inside, in float32; None for a float32 node."""
    known = [value.dtype for value in (*node.outputs, *node.inputs) if value is not None and value.dtype is not None]
    return known[0] if known and known[0] != ir.DataType.FLOAT else None


def _plain_attention(node: ir.Node) -> Sequence[ir.Value]:
    """Query, key, value and additive mask of an Attention without other inputs."""
    inputs = [value for value in node.inputs if value is not None]
    given = {name for name, attribute in node.attributes.items() if attribute.value}
    used = [value for value in node.outputs[1:] if value.uses()]
    if len(inputs) != 4 or used or not given <= {"scale", "softcap", "softmax_precision"} or "scale" not in given:
        _refuse(node, "has inputs or attributes that cannot be expanded")
    return inputs


def _rms_normalization(edit: NodeEditor, node: ir.Node) -> ir.Value:
    """RMSNormalization-23 over the last axis: `x / sqrt(mean(x^2) + epsilon) * scale`."""
    content, scale = node.inputs[0], node.inputs[1]
    if content is None or scale is None or node.attributes.get_int("axis", -1) != -1:
        _refuse(node, "normalizes more than the last axis")
    half = _half(node)
    content = edit.one("Cast", [content], {"to": ir.DataType.FLOAT}) if half else content
    mean = edit.one("ReduceMean", [edit.one("Mul", [content, content]), integers(edit.graph, -1)])
    epsilon = scalar(edit.graph, node.attributes.get_float("epsilon", 1e-5))
    root = edit.one("Sqrt", [edit.one("Add", [mean, epsilon])])
    normal = edit.one("Div", [content, root])
    return edit.one("Mul", [edit.one("Cast", [normal], {"to": half}) if half else normal, scale])


def _rotary_embedding(edit: NodeEditor, node: ir.Node) -> ir.Value:
    """RotaryEmbedding-23 on `[batch, heads, new, size]`: rotates the first `rotary_embedding_dim` of each head."""
    content, cosines, sines, *positions = node.inputs
    num_heads = node.attributes.get_int("num_heads", 0)
    if content is None or cosines is None or sines is None or num_heads:
        _refuse(node, "has inputs or attributes that cannot be expanded")
    ones = integers(edit.graph, 1)
    if positions and positions[0] is not None:  # tables by position; otherwise per token
        cosines, sines = (edit.one("Gather", [table, positions[0]], {"axis": 0}) for table in (cosines, sines))
    cosines, sines = (edit.one("Unsqueeze", [table, ones]) for table in (cosines, sines))
    size = node.attributes.get_int("rotary_embedding_dim", 0)
    rotated, rest = content, None
    if size:
        rotated, rest = _slice(edit, content, 0, size), _slice(edit, content, size, TO_THE_END)
    halves = _pairs(edit, rotated, bool(node.attributes.get_int("interleaved", 0)))
    rotated = _rotate(edit, *halves, cosines, sines, bool(node.attributes.get_int("interleaved", 0)), rotated)
    return rotated if rest is None else edit.one("Concat", [rotated, rest], {"axis": -1})


def _pairs(edit: NodeEditor, content: ir.Value, interleaved: bool) -> tuple[ir.Value, ir.Value]:
    """The two numbers of every pair: adjacent numbers, or the same index in both halves."""
    if interleaved:
        return _slice(edit, content, 0, TO_THE_END, 2), _slice(edit, content, 1, TO_THE_END, 2)
    first, second = edit.add("Split", [content], {"axis": -1, "num_outputs": 2}, outputs=2)
    return first, second


def _rotate(
    edit: NodeEditor,
    first: ir.Value,
    second: ir.Value,
    cosines: ir.Value,
    sines: ir.Value,
    interleaved: bool,
    like: ir.Value,
) -> ir.Value:
    """The pairs rotated by their angles, in the original order."""

    def product(left: ir.Value, right: ir.Value) -> ir.Value:
        return edit.one("Mul", [left, right])

    real = edit.one("Sub", [product(first, cosines), product(second, sines)])
    imaginary = edit.one("Add", [product(first, sines), product(second, cosines)])
    if not interleaved:
        return edit.one("Concat", [real, imaginary], {"axis": -1})
    last = integers(edit.graph, -1)
    pairs = edit.one("Concat", [edit.one("Unsqueeze", [part, last]) for part in (real, imaginary)], {"axis": -1})
    return edit.one("Reshape", [pairs, edit.one("Shape", [like])])


def _slice(edit: NodeEditor, content: ir.Value, start: int, end: int, step: int = 1) -> ir.Value:
    """A slice of the last axis."""
    return edit.one("Slice", [content, *(integers(edit.graph, number) for number in (start, end, -1, step))])


_EXPANSIONS: dict[str, Callable[[NodeEditor, ir.Node], ir.Value]] = {
    "Attention": _attention,
    "RMSNormalization": _rms_normalization,
    "RotaryEmbedding": _rotary_embedding,
}


def _refuse(node: ir.Node, problem: str) -> NoReturn:
    raise UnsupportedInput(
        f"`--opset`: the operator `{node.op_type}` of `{node.name}` {problem}", hint="export with `--opset 23`"
    )
