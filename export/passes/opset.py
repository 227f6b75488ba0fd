"""`--opset`: the same graph for older runtimes (operators of opset 23 spelled out in primitive ones) or newer ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import onnx
import onnx_ir as ir

from llmconv.errors import UnsupportedInput
from llmconv.export.passes.edits import Editor, integers, scalar

OPSETS = (21, 23, 24)
IR_VERSIONS = {21: 10, 23: 10, 24: 11}
"""The file format that runtimes of that opset read."""


def to_opset(model: ir.Model, opset: int) -> None:
    """Rewrites a graph for another version of the standard operators.

    Raises:
        UnsupportedInput: an operator neither exists in that version nor can be spelled out.
    """
    for nodes in (model.graph, *model.functions.values()):
        for node in list(nodes):
            if node.domain == "" and not _exists(node.op_type, opset):
                _spell_out(node, opset)
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


def _spell_out(node: ir.Node, opset: int) -> None:
    spell = _SPELLED.get(node.op_type)
    if spell is None or not isinstance(node.graph, ir.Graph):
        _refuse(node, f"has no equal in opset {opset}")
    result = spell(Editor(node.graph, node.name or node.op_type, node), node)
    old = node.outputs[0]
    result.name, result.shape, result.type = old.name, old.shape, old.type
    old.name = None
    old.replace_all_uses_with(result, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)


def _attention(edit: Editor, node: ir.Node) -> ir.Value:
    """Attention-23: `softmax(softcap(scale * q @ k^T) + mask) @ v`.

    Query heads that share a key/value head are laid behind one another, so that keys and values need no repeating:
    `[batch, heads, new, size]` and `[batch, kv_heads, heads / kv_heads * new, size]` are the same numbers in a row.
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
    scores = edit.one("MatMul", [grouped, edit.one("Transpose", [key], {"perm": [0, 1, 3, 2]})])
    scores = edit.one("Mul", [scores, scalar(edit.graph, node.attributes.get_float("scale", 0.0))])
    scores = reshaped(scores, per_query, rest)
    softcap = node.attributes.get_float("softcap", 0.0)
    if softcap:
        cap = scalar(edit.graph, softcap)
        scores = edit.one("Mul", [edit.one("Tanh", [edit.one("Div", [scores, cap])]), cap])
    weights = edit.one("Softmax", [edit.one("Add", [scores, mask])], {"axis": -1})
    mixed = edit.one("MatMul", [reshaped(weights, per_key, rest, total), value])
    return reshaped(mixed, per_query, rest)


def _plain_attention(node: ir.Node) -> Sequence[ir.Value]:
    """Query, key, value and additive mask of an Attention that has nothing else."""
    inputs = [value for value in node.inputs if value is not None]
    given = {name for name, attribute in node.attributes.items() if attribute.value}
    used = [value for value in node.outputs[1:] if value.uses()]
    if len(inputs) != 4 or used or not given <= {"scale", "softcap"} or "scale" not in given:
        _refuse(node, "is of a kind that is not spelled out")
    return inputs


def _rms_normalization(edit: Editor, node: ir.Node) -> ir.Value:
    """RMSNormalization-23 over the last axis: `x / sqrt(mean(x^2) + epsilon) * scale`."""
    content, scale = node.inputs[0], node.inputs[1]
    if content is None or scale is None or node.attributes.get_int("axis", -1) != -1:
        _refuse(node, "normalises more than the last axis")
    mean = edit.one("ReduceMean", [edit.one("Mul", [content, content]), integers(edit.graph, -1)])
    epsilon = scalar(edit.graph, node.attributes.get_float("epsilon", 1e-5))
    root = edit.one("Sqrt", [edit.one("Add", [mean, epsilon])])
    return edit.one("Mul", [edit.one("Div", [content, root]), scale])


_SPELLED: dict[str, Callable[[Editor, ir.Node], ir.Value]] = {
    "Attention": _attention,
    "RMSNormalization": _rms_normalization,
}


def _refuse(node: ir.Node, problem: str) -> NoReturn:
    raise UnsupportedInput(
        f"`--opset`: the operator `{node.op_type}` of `{node.name}` {problem}", hint="export with `--opset 23`"
    )
