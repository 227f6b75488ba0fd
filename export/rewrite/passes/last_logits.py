"""`--last-logits`: computes the head for the last position only, which saves time for long prompts."""

from __future__ import annotations

from typing import NoReturn

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.errors import UnsupportedInput
from llmconv.export.node_editor import NodeEditor, ancestors, integers, value_named

TO_THE_END = (1 << 63) - 1
TOKENS = {"input_ids", "inputs_embeds"}
ROWWISE = {"Add", "Cast", "Clip", "Div", "Identity", "Max", "Min", "Mul", "Sub", "Tanh"}
"""Operators that may follow the head, such as scaling and soft-capping: they work on each row alone."""


def keep_last_logits(model: ir.Model) -> None:
    """Changes `logits` to `[batch_size, 1, vocab]`, those of the last position, in place.

    With padding on the left the last position is always a real token.

    Raises:
        UnsupportedInput: the logits are not the rows of a linear layer, scaled or capped.
    """
    graph = model.graph
    logits = value_named(graph.outputs, "logits")
    if logits is None or logits.shape is None:
        _refuse("has no output `logits`")
    vocabulary = int(logits.shape[2])  # type: ignore[arg-type]
    head = _head(logits, vocabulary)
    editor = NodeEditor(graph, head, "last_logits")
    hidden = head.inputs[0]
    assert hidden is not None
    if head.op_type == "Gemm":  # it takes a matrix: [batch * sequence, features]
        flat = hidden.producer()
        if flat is None or flat.op_type != "Reshape" or flat.inputs[0] is None or flat.inputs[1] is None:
            _refuse("flattens its hidden state in an unsupported way")
        last = _last(editor, flat.inputs[0])
        head.replace_input_with(0, editor.one("Reshape", [last, flat.inputs[1]]))
    else:
        head.replace_input_with(0, _last(editor, hidden))
    logits.shape = ir.Shape([logits.shape[0], 1, vocabulary])
    RemoveUnusedNodesPass()(model)


def _last(editor: NodeEditor, hidden: ir.Value) -> ir.Value:
    """The last position of `[batch, sequence, features]`."""
    ends = [integers(editor.graph, number) for number in (-1, TO_THE_END, 1)]
    return editor.one("Slice", [hidden, *ends])


def _head(logits: ir.Value, vocabulary: int) -> ir.Node:
    """The linear layer that computes the logits; a Reshape after it is changed to one position."""
    node = logits.producer()
    while node is not None and node.op_type not in ("Gemm", "MatMul", "MatMulNBits"):
        if node.op_type == "Reshape":
            node.replace_input_with(1, integers(node.graph, -1, 1, vocabulary))  # type: ignore[arg-type]
            source = node.inputs[0]
        else:
            source = _row_source(node)
        node = source.producer() if source is not None else None
    if node is None:
        _refuse("has no linear layer before its logits")
    return node


def _row_source(node: ir.Node) -> ir.Value | None:
    """The only input of a rowwise node that depends on the tokens."""
    inputs = [value for value in node.inputs if value is not None]
    variable = [value for value in inputs if any(part.name in TOKENS for part in ancestors(value))]
    if node.op_type not in ROWWISE or len(variable) != 1:
        _refuse(f"computes its logits with the unsupported operator `{node.op_type}`")
    return variable[0]


def _refuse(problem: str) -> NoReturn:
    raise UnsupportedInput(f"`--last-logits`: this model {problem}", hint="export without `--last-logits`")
