"""Passes over a finished graph: tokens instead of logits (`--postprocess`), an older opset, a cache of integer codes.

`GroupQueryAttention` rounds new keys and values, and attends over code * scale (onnxruntime docs/ContribOperators.md:
`k_scale`, `v_scale`, `k_quant_type`, `kv_cache_bit_width`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import onnx
import onnx_ir as ir

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export.traced_graph import NodeEditor, constant, integers, replace_value, scalar, value_named
from llmconv.runtime.extra_inputs import is_past
from llmconv.tensors import Array

TOKENS, SCORES = "tokens", "scores"  # names of the outputs, see `choose_tokens`


@dataclass(frozen=True)
class TokenChoice:
    """Number of tokens that the graph chooses at every position: `argmax` or `topk:K`."""

    text: str
    count: int | None  # K, or None for `argmax`, whose outputs have no axis K

    @classmethod
    def parse(cls, text: str) -> TokenChoice:
        """The choice described by `argmax` or `topk:K`; UsageProblem for any other text, or a K of 0."""
        if text == "argmax":
            return cls(text, None)
        found = re.fullmatch(r"topk:(\d{1,9})", text)
        if found and not int(found[1]):
            raise UsageProblem(f"`--postprocess {text}` chooses no tokens", hint="give a K of 1 or more")
        if not found:
            raise UsageProblem(f"unknown `--postprocess {text}`", hint="give `argmax` or `topk:K`, such as `topk:40`")
        return cls(text, int(found[1]))


def choose_tokens(model: ir.Model, choice: TokenChoice) -> None:
    """Replaces the output `logits` by `tokens` (int64) and `scores` (float32), in place.

    Both are `[batch_size, sequence_length]` for `argmax`, usable as the next `input_ids`, and `[…, K]` for `topk:K`,
    most likely first; of equally likely tokens the lower id first. A score is the natural logarithm of the token's
    probability over the whole vocabulary: `logit - logsumexp(logits)`. Raises UsageProblem: K is larger than the
    vocabulary.
    """
    graph = model.graph
    logits = value_named(graph.outputs, "logits")
    assert logits is not None and logits.shape is not None
    *axes, vocabulary = logits.shape
    if choice.count and isinstance(vocabulary, int) and choice.count > vocabulary:
        raise UsageProblem(
            f"`--postprocess {choice.text}` exceeds the vocabulary of {vocabulary} tokens", hint="give a smaller K"
        )
    logits.name = "postprocess/logits"
    editor = NodeEditor(graph, scope="postprocess")
    if choice.count is None:
        best = editor.one("ReduceMax", [logits, integers(graph, -1)], {"keepdims": 0})
        tokens = editor.one("ArgMax", [logits], {"axis": -1, "keepdims": 0})
    else:
        best, tokens = editor.add("TopK", [logits, integers(graph, choice.count)], {"axis": -1}, outputs=2)
    total = editor.one("ReduceLogSumExp", [logits, integers(graph, -1)], {"keepdims": int(choice.count is not None)})
    scores = editor.one("Sub", [best, total])
    if choice.count is not None:
        axes.append(choice.count)
    for value, name, dtype in ((tokens, TOKENS, ir.DataType.INT64), (scores, SCORES, ir.DataType.FLOAT)):
        value.name, value.shape, value.type = name, ir.Shape(axes), ir.TensorType(dtype)
    logits.shape = logits.type = None
    graph.outputs[:] = [tokens, scores, *(value for value in graph.outputs if value is not logits)]


TO_THE_END = (1 << 63) - 1
IR_VERSIONS = {21: 10, 23: 10, 24: 11}  # opset to the version of the file format that its runtimes read


def to_opset(model: ir.Model, opset: int) -> None:
    """Rewrites a graph for another opset, in place; UnsupportedInput for an operator that cannot be expanded."""
    for nodes in (model.graph, *model.functions.values()):
        for node in list(nodes):
            if node.domain or _exists(node.op_type, opset):
                continue
            expand = _EXPANSIONS.get(node.op_type)
            if expand is None or not isinstance(node.graph, ir.Graph):
                _refuse(node, f"has no equivalent in opset {opset}")
            replace_value(node.outputs[0], expand(NodeEditor(node.graph, node, node.name or node.op_type), node))
            node.graph.remove(node, safe=True)
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
    interleaved = node.attributes.get_int("interleaved", 0)
    if interleaved:  # the two numbers of every pair are adjacent
        first, second = (_slice(edit, rotated, start, TO_THE_END, 2) for start in (0, 1))
    else:
        first, second = edit.add("Split", [rotated], {"axis": -1, "num_outputs": 2}, outputs=2)

    def product(left: ir.Value, right: ir.Value) -> ir.Value:
        return edit.one("Mul", [left, right])

    real = edit.one("Sub", [product(first, cosines), product(second, sines)])
    imaginary = edit.one("Add", [product(first, sines), product(second, cosines)])
    if interleaved:
        last = integers(edit.graph, -1)
        pairs = edit.one("Concat", [edit.one("Unsqueeze", [part, last]) for part in (real, imaginary)], {"axis": -1})
        rotated = edit.one("Reshape", [pairs, edit.one("Shape", [rotated])])
    else:
        rotated = edit.one("Concat", [real, imaginary], {"axis": -1})
    return rotated if rest is None else edit.one("Concat", [rotated, rest], {"axis": -1})


def _slice(edit: NodeEditor, content: ir.Value, start: int, end: int, step: int = 1) -> ir.Value:
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


PAST = (3, 4)  # indices of the inputs with past keys and values; the outputs 1 and 2 are the present ones
SCALES = (12, 13)  # indices of the inputs with scales of keys and of values
TYPES, BITS = ("k_quant_type", "v_quant_type"), "kv_cache_bit_width"  # attributes of the operator


def quantize_cache(model: ir.Model, scales: Mapping[str, Array]) -> None:
    """Makes every cache input and output of a graph with a shared buffer int8, in place.

    Scales are float32 [1, kv_heads, 1, head_dim], by name of the cache input.
    """
    graph = model.graph
    attention = [node for node in graph if node.op_type == "GroupQueryAttention"]
    for node in attention:
        node.resize_inputs(max(len(node.inputs), SCALES[-1] + 1))
        for at, (past, scale) in enumerate(zip(PAST, SCALES, strict=True)):
            port = node.inputs[past]
            assert port is not None and port.name is not None
            node.replace_input_with(scale, constant(graph, f"{port.name}.scale", scales[port.name]))
            port.type = node.outputs[1 + at].type = ir.TensorType(ir.DataType.INT8)
        node.attributes.update({name: ir.AttrString(name, "PER_CHANNEL") for name in TYPES})
        node.attributes[BITS] = ir.AttrInt64(BITS, 8)


def require_grouped_query(model: ir.Model, family: object) -> None:
    """Raises UnsupportedInput if another operator than `GroupQueryAttention` reads the shared buffer."""
    graph = model.graph
    for port in graph.inputs:
        read = [(use.node.op_type, use.idx) for use in port.uses()] if is_past(port.name or "") else []
        if any(operator != "GroupQueryAttention" or at not in PAST for operator, at in read):
            raise UnsupportedInput(
                f"the attention of `{family}` is not a GroupQueryAttention, the only operator for `--kv-cache int8`",
                hint="leave out `--kv-cache`",
            )
