"""Faulty graphs of options: at least one small, plausible bug for each, by surgery on real exports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from llmconv.tensors import Array
from tests.builders.mutants.surgery import add_constant, constants

Surgery = Callable[[onnx.ModelProto], bool]
"""Changes a graph, or returns False where the graph has no such place."""


@dataclass(frozen=True)
class OptionMutant:
    """One bug: its name, the options of the export it is made in, and the surgery, done to every file."""

    name: str
    options: dict[str, Any] = field(hash=False)
    apply: Surgery = field(hash=False)


def node_named(model: onnx.ModelProto, name: str) -> onnx.NodeProto | None:
    """The node of that name."""
    return next((node for node in model.graph.node if node.name == name), None)


def constants_of(model: onnx.ModelProto) -> list[tuple[str, Array]]:
    """Names and values of the constants in a graph."""
    return [(tensor.name, value) for tensor, value in constants(model)]


def rewired(name: str, **inputs: int | float | str) -> Surgery:
    """Other inputs for one node: `i0` is the first; a number is a new constant `[1]`, int64 or float32."""

    def apply(model: onnx.ModelProto) -> bool:
        node = node_named(model, name)
        for place, value in inputs.items() if node else ():
            kind = np.int64 if isinstance(value, int) else np.float32
            new = value if isinstance(value, str) else add_constant(model, np.array([value], kind))
            node.input[int(place[1:])] = new  # type: ignore[union-attr]
        return node is not None

    return apply


def retyped(name: str, op_type: str) -> Surgery:
    """Another operator for one node."""

    def apply(model: onnx.ModelProto) -> bool:
        node = node_named(model, name)
        if node is not None:
            node.op_type = op_type
        return node is not None

    return apply


def all_positions(model: onnx.ModelProto) -> bool:
    """Every position's logits, although the manifest says the last one's."""
    reshape = next(node for node in model.graph.node if "int64_-1_1_96" in node.input)
    vocabulary = next(name for name, value in constants_of(model) if value.tolist() == [96])
    reshape.input[1] = next(node.output[0] for node in model.graph.node if vocabulary in node.input)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "sequence_length"
    return rewired("last_logits/Slice", i1=-(1 << 40))(model)


def smallest_first(model: onnx.ModelProto) -> bool:
    """The K least likely tokens."""
    node = node_named(model, "postprocess/TopK")
    assert node is not None
    node.attribute.append(onnx.helper.make_attribute("largest", 0))
    return True


def prefix_swapped(model: onnx.ModelProto) -> bool:
    """Keys of one layer's prefix are its values."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    if "prefix.1.key" not in tensors:
        return False
    tensors["prefix.1.key"].external_data[1].value = tensors["prefix.1.value"].external_data[1].value
    return True


LAST, TOP = {"last_logits": True}, {"postprocess": "topk:3", "last_logits": True}
PREFIX, SOFT = {"prefix": "PrefixTuning"}, {"prefix": "PromptTuning"}

OPTION_MUTANTS = (
    OptionMutant("the head runs on the first position", LAST, rewired("last_logits/Slice", i1=0, i2=1)),
    OptionMutant("all positions where one is promised", LAST, all_positions),
    OptionMutant("the least likely token", {"postprocess": "argmax"}, retyped("postprocess/ArgMax", "ArgMin")),
    OptionMutant("the K least likely tokens", TOP, smallest_first),
    OptionMutant("scores relative to the best", TOP, retyped("postprocess/ReduceLogSumExp", "ReduceMax")),
    OptionMutant(
        "a stage forgets what it was given",
        {"stages": 2},
        rewired("model.layers.2/Add", i0="model.layers.2.self_attn.o_proj/Reshape_2:0"),
    ),
    OptionMutant("the prefix counts for no position", PREFIX, rewired("prefix/Add", i1=0)),
    OptionMutant("the prefix is one token short", PREFIX, rewired("prefix/Where", i1=4)),
    OptionMutant("the prefix is masked", SOFT, rewired("prefix/Expand", i0=0)),
    OptionMutant("the prefix comes again with every turn", SOFT, rewired("prefix/Where", i2=5)),
    OptionMutant("keys of the prefix are its values", PREFIX, prefix_swapped),
    OptionMutant(
        "attention scale 1 % off, spelled out",
        {"opset": 21},
        rewired("model.layers.1.self_attn/Attention/Mul", i1=0.2525),
    ),
)
