"""The head of a language model, computed for the last position only, or for the positions that a call asks for."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from llmconv.errors import UnsupportedInput
from llmconv.export.traced_graph import NodeEditor, ancestors, constant, integers, producer, rank, value_named
from llmconv.runtime.extra_inputs import LOGITS_FROM, WRITE_INDICES

TO_THE_END = (1 << 63) - 1
LOGITS_RANK = 3
HEADS = "Gemm", "MatMul", "MatMulNBits", "FusedMatMul"
TOKENS = {"input_ids", "inputs_embeds"}
ROWWISE = {"Add", "Cast", "Clip", "Div", "Identity", "Max", "Min", "Mul", "Sub", "Tanh"}
"""Operators that may follow the head, such as scaling and soft-capping: they work on each row alone."""


def keep_last_logits(model: ir.Model) -> None:
    """Changes `logits` to `[batch_size, 1, vocab]`, those of the last position, in place.

    With padding on the left the last position is always a real token. Calls of a static graph are padded on the right,
    where the last position that the mask has is the one. Raises UnsupportedInput: the logits are not the rows of a
    linear layer, scaled or capped.
    """
    graph = model.graph
    logits = value_named(graph.outputs, "logits")
    if logits is None or logits.shape is None:
        _refuse("has no output `logits`")
    vocabulary = int(logits.shape[2])  # type: ignore[arg-type]
    head, reshapes = _head(logits)
    for node in reshapes:
        node.replace_input_with(1, integers(graph, -1, 1, vocabulary))
    editor = NodeEditor(graph, head, "last_logits")
    hidden, flat = _hidden(head, is_reshaped=bool(reshapes))
    last = _last(editor, hidden)
    head.replace_input_with(0, last if flat is None else editor.one("Reshape", [last, flat]))
    logits.shape = ir.Shape([logits.shape[0], 1, vocabulary])
    RemoveUnusedNodesPass()(model)


def compute_logits_from(model: ir.Model) -> None:
    """Adds an input `logits_from`, int64 [1], by default 0: `logits` are those of the tokens from it on, in place.

    It is -1 for the last token, also of a graph that computes no other.

    So a prompt whose last logits alone are read skips the rest of the head, which is most of a small model. A graph
    stays as it is if its logits are not the rows of a linear layer, scaled or capped, or of a fixed number of tokens.
    """
    graph = model.graph
    logits = value_named(graph.outputs, "logits")
    if logits is None or logits.shape is None or len(logits.shape) != LOGITS_RANK or isinstance(logits.shape[1], int):
        return  # it has one position, or is padded on the right
    try:
        head, reshapes = _head(logits)
        hidden, flat = _hidden(head, is_reshaped=bool(reshapes))
    except UnsupportedInput:
        return
    start, editor = constant(graph, LOGITS_FROM, np.zeros(1, np.int64)), NodeEditor(graph, head, LOGITS_FROM)
    graph.inputs.append(start)
    ends, axes = (integers(graph, number) for number in (TO_THE_END, 1))
    asked = editor.one("Slice", [hidden, start, ends, axes])
    head.replace_input_with(0, asked if flat is None else editor.one("Reshape", [asked, flat]))
    if reshapes:
        rows = editor.one("Shape", [asked], {"start": 0, "end": 2})
        shape = editor.one("Concat", [rows, integers(graph, int(logits.shape[2]))], {"axis": 0})  # type: ignore[arg-type]
        for node in reshapes:
            node.replace_input_with(1, shape)
    logits.shape = ir.Shape([logits.shape[0], LOGITS_FROM, logits.shape[2]])


def _hidden(head: ir.Node, *, is_reshaped: bool) -> tuple[ir.Value, ir.Value | None]:
    """The hidden state [batch, sequence, features] before a head, and the shape to which it is flattened, if it is.

    A product whose result `is_reshaped` may be one of a matrix [batch * sequence, features], as `Gemm` always is.
    """
    hidden = head.inputs[0]
    assert hidden is not None
    if head.op_type != "Gemm" and (not is_reshaped or rank(hidden) == LOGITS_RANK):
        return hidden, None
    flat = producer(hidden, "Reshape")
    shape = flat.inputs[1].const_value if flat is not None and flat.inputs[1] is not None else None
    if flat is None or flat.inputs[0] is None or shape is None or shape.numpy()[:-1].tolist() != [-1]:
        _refuse("flattens its hidden state in an unsupported way")
    return flat.inputs[0], flat.inputs[1]


def _last(editor: NodeEditor, hidden: ir.Value) -> ir.Value:
    """The hidden state `[batch, 1, features]` of the last position of `[batch, sequence, features]`."""
    graph = editor.graph
    starts, mask = (value_named(graph.inputs, name) for name in (WRITE_INDICES, "attention_mask"))
    if starts is None or mask is None or graph.inputs[0].shape[1] == 1:  # type: ignore[index]
        return editor.one("Slice", [hidden, *(integers(graph, number) for number in (-1, TO_THE_END, 1))])
    one = integers(graph, 1)
    slots = constant(graph, "int64_slots", np.arange(1, int(mask.shape[1]) + 1))  # type: ignore[index, arg-type]
    filled = editor.one("ReduceMax", [editor.one("Mul", [mask, slots]), one], {"keepdims": 0})
    place = editor.one("Sub", [editor.one("Sub", [filled, starts]), one])
    place = editor.one("Unsqueeze", [editor.one("Max", [place, integers(graph, 0)]), one])
    return editor.one("Unsqueeze", [editor.one("GatherND", [hidden, place], {"batch_dims": 1}), one])


def _head(logits: ir.Value) -> tuple[ir.Node, list[ir.Node]]:
    """The linear layer that computes the logits, and the nodes that reshape its result."""
    node, reshapes = logits.producer(), []
    while node is not None and node.op_type not in HEADS:
        if node.op_type == "Reshape":
            reshapes.append(node)
            source = node.inputs[0]
        else:  # the only input of a rowwise node that depends on the tokens
            inputs = [value for value in node.inputs if value is not None]
            variable = [value for value in inputs if any(part.name in TOKENS for part in ancestors(value))]
            if node.op_type not in ROWWISE or len(variable) != 1:
                _refuse(f"computes its logits with the unsupported operator `{node.op_type}`")
            source = variable[0]
        node = source.producer() if source is not None else None
    if node is None:
        _refuse("has no linear layer before its logits")
    return node, reshapes


def _refuse(problem: str) -> NoReturn:
    raise UnsupportedInput(f"`--last-logits`: this model {problem}", hint="export without `--last-logits`")
