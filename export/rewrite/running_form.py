"""The form of a portable graph that onnxruntime's CPU runs fastest, made in memory when the graph is opened.

    Attention(q, Concat(past, new), …, mask)  ->  GroupQueryAttention(q, new, …, past, …, bias=mask)

and then the passes of `--target ort-cpu`; a call may also say from which token on it reads logits. Past and present
share one buffer, so a step does not copy the past. The cache stays as it is, and only the passes run, if part of it
cannot be such a buffer (states, keys and values of different sizes), if a token may attend to later ones, or if an
input belongs to all tokens or to whole rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx.shape_inference import infer_shapes

from llmconv.errors import LlmconvError
from llmconv.files.safe_folder import replace_file, user_cache
from llmconv.runtime.extra_inputs import CACHE_RANK, LOGITS_FROM, MAX_LENGTH, SCAN, is_past, is_present
from llmconv.runtime.onnxruntime.guard import refill
from llmconv.runtime.onnxruntime.packed_cache import make_private

if TYPE_CHECKING:
    import onnx_ir as ir

LENGTH_AXIS = 2
TO_THE_END = (1 << 63) - 1
FUSED = {"GroupQueryAttention", "LinearAttention", "TensorScatter"}  # a graph with one of these has a form of its own
CODES = "MatMulNBits"  # product with codes, whose shape onnx does not know
PAST_INPUTS = 3, 4  # indices of keys and values among the inputs of `GroupQueryAttention`
ROUNDS = 4  # of inference: a size may follow from another that was open
TOKEN_INPUTS = ("input_ids", "inputs_embeds")
OPSET = 23  # the first with `Attention`
CODE = "rewrite/running_form.py", "rewrite/fused_operators.py", "rewrite/last_logits.py", "traced_graph.py"


def to_running_form(path: Path, model: onnx.ModelProto) -> None:
    """Rewrites the graph of `path`, without its weights, in place; leaves one as it is that has no such form.

    Of a graph that was exported for one runtime only the head changes, see `compute_logits_from`. The result is kept in
    the user's cache, where there is one that only the user can change.
    """
    if not (may_change(model) or _is_whole(model)):
        return
    try:
        kept = _place(model)
        make_private(kept.parent)
    except (LlmconvError, OSError):  # no home folder, or a read-only disk
        model.CopyFrom(rewritten(model))
        return
    with suppress(OSError, DecodeError):
        found = onnx.load_model_from_string(kept.read_bytes())
        ports = _ports(found)
        if ([name for name in ports[0] if name != LOGITS_FROM], ports[1]) == _ports(model):  # else it is damaged
            model.CopyFrom(found)
            return
    model.CopyFrom(rewritten(model))
    with suppress(LlmconvError, OSError):
        replace_file(kept, model.SerializeToString(deterministic=True))


def may_change(model: onnx.ModelProto) -> bool:
    """Whether a graph may have another form: a whole decoder of standard operators, with a cache of floats.

    Recurrent layers are functions of them.
    """
    operators = {node.op_type for node in model.graph.node}
    opset = next((one.version for one in model.opset_import if not one.domain), 0)
    past = [port.type.tensor_type.elem_type for port in model.graph.input if is_past(port.name)]
    is_float = bool(past) and set(past) == {onnx.TensorProto.FLOAT}
    return (
        _is_whole(model)
        and is_float
        and opset >= OPSET
        and not operators & FUSED
        and all(function.domain == SCAN for function in model.functions)
        and (len(model.functions) > 0 or "Attention" in operators)
    )


def _is_whole(model: onnx.ModelProto) -> bool:
    """Whether a graph takes tokens, or their embeddings, and a mask, and returns logits or tokens."""
    names = [port.name for port in (*model.graph.input[:2], *model.graph.output[:1])]
    whole = names in [[tokens, "attention_mask", out] for tokens in TOKEN_INPUTS for out in ("logits", "tokens")]
    return whole and not any(graph.sparse_initializer for graph in _graphs(model.graph))  # which onnx_ir leaves out


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those in the branches and loops of its nodes."""
    yield graph
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        for inner in (attribute.g, *attribute.graphs):
            if inner.node:
                yield from _graphs(inner)


def _runs_in_parts(graph: onnx.GraphProto) -> bool:
    """Whether further inputs belong to new tokens: with buffers one call may become several, see `GraphSpec`."""
    new, total = (_axes(port.type.tensor_type)[1:2] for port in graph.input[:2])
    defaults = {tensor.name for tensor in graph.initializer}  # of LoRA factors, which are those of all calls
    given = [port for port in graph.input[2:] if not is_past(port.name) and port.name not in defaults]
    others = [set(_axes(port.type.tensor_type)) for port in given]
    return all({*new} <= axes and not {*total} & axes for axes in others)


def _ports(model: onnx.ModelProto) -> tuple[list[str], list[str]]:
    return [port.name for port in model.graph.input], [port.name for port in model.graph.output]


def _place(model: onnx.ModelProto) -> Path:
    """The file of a graph's form, named after the graph, the code that rewrites it, and its libraries."""
    code = [Path(__file__).parents[1] / name for name in CODE]
    versions = [version(name).encode() for name in ("onnx", "onnx-ir")]
    content = [model.SerializeToString(deterministic=True), *(one.read_bytes() for one in code), *versions]
    digest = hashlib.sha256(b"".join(content)).hexdigest()[:32]
    return user_cache("forms") / f"{digest}.onnx"


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    """The form of a graph that runs prompts and steps; the graph itself if it has none."""
    import onnx_ir as ir  # noqa: PLC0415 - half a second, for a graph that is not in the cache

    from llmconv.export.rewrite.fused_operators import fuse_for_target  # noqa: PLC0415 - as above
    from llmconv.export.rewrite.last_logits import compute_logits_from  # noqa: PLC0415 - as above
    from llmconv.export.traced_graph import MICROSOFT  # noqa: PLC0415 - as above

    shapes = _inferred(model) if may_change(model) else None
    if shapes is None:
        found = ir.from_proto(model)
    else:
        found = (_with_buffers(ir.from_proto(shapes)) if _runs_in_parts(model.graph) else None) or ir.from_proto(shapes)
        fuse_for_target(found, "ort-cpu")
        convolve_few_columns(found)
    compute_logits_from(found)
    if [node.op_type for node in found.graph] == [node.op_type for node in model.graph.node]:
        return model
    found.opset_imports.setdefault(MICROSOFT, 1)
    for number, node in enumerate(found.graph):
        node.name = node.name or f"running/{node.op_type}_{number}"
        for index, value in enumerate(node.outputs):
            value.name = value.name or f"{node.name}:{index}"
    made: onnx.ModelProto = ir.to_proto(found)
    del made.graph.value_info[:]
    return made


def _with_buffers(model: ir.Model) -> ir.Model | None:
    """The graph, changed in place, with a cache of shared buffers; None if part of the cache cannot be one."""
    import onnx_ir as ir  # noqa: PLC0415 - as above

    from llmconv.export.rewrite.fused_operators import (  # noqa: PLC0415 - as above
        is_causal,
        use_grouped_query_attention,
    )

    graph = model.graph
    past = [value for value in graph.inputs if is_past(value.name or "")]
    if any(len(value.shape or ()) != CACHE_RANK for value in past):
        return None
    attentions = [node for node in graph if node.op_type == "Attention"]
    if not all(is_causal(node) for node in attentions):
        return None
    _count_by_mask(graph, past)
    use_grouped_query_attention(model)
    present = [value for value in graph.outputs if is_present(value.name or "")]
    if not past or not all(_is_buffer(value) for value in past) or any(value.uses() for value in present):
        return None  # a node that reads the present would see a whole buffer
    for value in (*past, *present):
        assert value.shape is not None
        value.shape = ir.Shape([*value.shape[:LENGTH_AXIS], MAX_LENGTH, *value.shape[LENGTH_AXIS + 1 :]])
    return model


FEW = 16  # tokens of a call up to which `CausalConvWithState` is faster than `Conv`
WINDOW_RANK = 3


def convolve_few_columns(model: ir.Model) -> None:
    """Gives calls of few tokens another operator for the convolution behind a window of the cache, in place.

    `Conv` takes a millisecond for the 6,144 channels of Qwen3.5-0.8B, however few columns there are, and
    `CausalConvWithState` a quarter; for a prompt it is the other way round (onnxruntime 1.31).
    """
    import onnx_ir as ir  # noqa: PLC0415 - as above

    from llmconv.export.traced_graph import MICROSOFT, NodeEditor, integers, replace_value  # noqa: PLC0415 - as above

    graph = model.graph
    found = [(node, past) for node in graph if (past := _window(node)) is not None]
    if not found:
        return
    edit = NodeEditor(graph, graph[0])
    tokens = edit.one("Shape", [graph.inputs[0]], {"start": 1, "end": 2})
    is_few = edit.one("Squeeze", [edit.one("LessOrEqual", [tokens, integers(graph, FEW)])])
    for node, past in found:
        before = node.attributes["kernel_shape"].as_ints()[0] - 1  # columns before the first one that is computed
        zero, start, end, axis = (integers(graph, number) for number in (0, before, TO_THE_END, WINDOW_RANK - 1))
        branches = []
        for name in ("then_branch", "else_branch"):
            inner = ir.Graph([], [], nodes=[], name=name)
            add = NodeEditor(inner, scope=f"{node.name}/{name}")
            if name == "else_branch":
                result = add.one("Conv", node.inputs, {key: one.value for key, one in node.attributes.items()})
            else:
                state = add.one("Slice", [past, zero, start, axis])
                columns = add.one("Slice", [node.inputs[0], start, end, axis])
                bias = [*node.inputs[2:], None][0]
                inputs = [columns, node.inputs[1], bias, state]
                result = add.add("CausalConvWithState", inputs, outputs=2, domain=MICROSOFT)[0]
            result.shape, result.type = node.outputs[0].shape, node.outputs[0].type
            inner.outputs.append(result)
            branches.append(ir.AttrGraph(name, inner))
        chosen = ir.node("If", [is_few], {branch.name: branch for branch in branches})
        graph.insert_before(node, chosen)
        replace_value(node.outputs[0], chosen.outputs[0])
        graph.remove(node, safe=True)
    graph.sort()


def _window(node: ir.Node) -> ir.Value | None:
    """The window in front of the columns of a depthwise convolution, a cache input; None for another node."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    joined = node.inputs[0].producer() if node.op_type == "Conv" and node.inputs[0] is not None else None
    past = joined.inputs[0] if joined is not None and joined.op_type == "Concat" and len(joined.inputs) == 2 else None
    if joined is None or past is None or not past.is_graph_input() or len(past.shape or ()) != WINDOW_RANK:
        return None
    assert past.shape is not None
    _, channels, width = past.shape
    kernel = [*attributes.get("kernel_shape", ()), 0][0]
    plain = {"pads": [0, 0], "strides": [1], "dilations": [1], "auto_pad": "NOTSET"}
    is_plain = all(attributes.get(name, value) in (value, tuple(value)) for name, value in plain.items())
    at_end = joined.attributes.get_int("axis") in (-1, WINDOW_RANK - 1)
    fits = isinstance(width, int) and 1 < kernel <= width + 1 and attributes.get("group") == channels
    return past if is_past(past.name or "") and is_plain and at_end and fits else None


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy with the shapes of all values; None if onnx cannot infer them.

    Meanwhile other nodes stand in for those that onnx does not know.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.functions[:]
    kept: dict[str, list[onnx.NodeProto]] = {}
    nodes: list[onnx.NodeProto] = []
    try:
        for number, node in enumerate(model.graph.node):
            stand_ins = _stand_ins(node, f"stand-in/{number}", made.graph)
            for at, one in enumerate(stand_ins):
                one.name = f"stand-in/{number}/{at}"
                kept[one.name] = [] if at else [node]
            nodes += stand_ins or [node]
        refill(made.graph.node, nodes)
        made = _with_shapes(made)
    except Exception:  # onnx raises its own errors for graphs that it does not know
        return None
    refill(made.graph.node, [one for node in made.graph.node for one in kept.get(node.name, [node])])
    del made.graph.input[len(model.graph.input) :]
    made.functions.extend(model.functions)
    return made


def _stand_ins(node: onnx.NodeProto, name: str, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Nodes whose outputs have the shapes of those of a node that onnx does not know; none for other nodes."""
    if node.op_type == CODES:  # a product of floats
        sizes = {one.name: one.i for one in node.attribute}
        graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [sizes["K"], sizes["N"]]))
        return [onnx.helper.make_node("MatMul", [node.input[0], name], node.output)]
    if node.domain == SCAN:  # the result is like the first input, the new state like the last one
        pairs = ((node.input[0], node.output[0]), (node.input[-1], node.output[1]))
        return [onnx.helper.make_node("Identity", [one], [other]) for one, other in pairs]
    return []


def _with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Adds all shapes to a graph; onnx leaves one axis open where a `Reshape` says -1, as for heads."""
    for _ in range(ROUNDS):
        made = infer_shapes(model, data_prop=True)
        known = {one.name: one.type.tensor_type for one in (*made.graph.value_info, *made.graph.input)}
        solved = []
        for node in made.graph.node:
            if node.op_type == "Reshape" and {node.input[0], node.output[0]} <= known.keys():
                before, after = (_axes(known[name]) for name in (node.input[0], node.output[0]))
                if (shape := _closed(before, after)) is not None:
                    kind = known[node.input[0]].elem_type
                    solved.append(onnx.helper.make_tensor_value_info(node.output[0], kind, shape))
        if not solved:
            break
        model.graph.value_info.extend(solved)
    return made


def _axes(declared: onnx.TypeProto.Tensor) -> list[int | str]:
    return [axis.dim_value or axis.dim_param for axis in declared.shape.dim]


def _closed(before: list[int | str], after: list[int | str]) -> list[int | str] | None:
    """The shape `after` a reshape with its one unknown axis computed from the others; None for another number."""
    open_axes = [at for at, axis in enumerate(after) if isinstance(axis, str) and axis not in before]
    others = [axis for axis in after if isinstance(axis, str)]
    symbols = [axis for axis in before if isinstance(axis, str)]
    if len(open_axes) != 1 or sorted(symbols) != sorted(axis for axis in others if axis != after[open_axes[0]]):
        return None
    sizes = [prod(axis for axis in axes if isinstance(axis, int)) for axes in (before, after)]
    return [sizes[0] // sizes[1] if at == open_axes[0] else axis for at, axis in enumerate(after)]


def _count_by_mask(graph: ir.Graph, past: list[ir.Value]) -> None:
    """Computes the number of past tokens from mask and tokens, where nodes read it from the shape of the past."""
    from llmconv.export.traced_graph import NodeEditor  # noqa: PLC0415 - as above

    edit, length = NodeEditor(graph, graph[0]), None
    for node in [use.node for value in past for use in value.uses() if use.node.op_type == "Shape"]:
        if (node.attributes.get_int("start", 0), node.attributes.get_int("end", -1)) != (LENGTH_AXIS, LENGTH_AXIS + 1):
            continue
        if length is None:
            tokens, mask = graph.inputs[:2]
            total, new = (edit.one("Shape", [value], {"start": 1, "end": 2}) for value in (mask, tokens))
            length = edit.one("Sub", [total, new])
        node.outputs[0].replace_all_uses_with(length)


def _is_buffer(value: ir.Value) -> bool:
    """Whether one `GroupQueryAttention` alone reads the past, and returns it, under the same name, with new tokens."""
    uses = [use for use in value.uses() if not _is_other_axis(use.node)]
    if len(uses) != 1 or uses[0].node.op_type != "GroupQueryAttention" or uses[0].idx not in PAST_INPUTS:
        return False
    present = uses[0].node.outputs[1 + uses[0].idx - PAST_INPUTS[0]].name or ""
    return present.partition(".")[2] == (value.name or "").partition(".")[2]


def _is_other_axis(node: ir.Node) -> bool:
    """Whether a node returns a size of the past other than the number of tokens."""
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", -1)
    return node.op_type == "Shape" and (0 <= start <= end <= LENGTH_AXIS or start > LENGTH_AXIS)
