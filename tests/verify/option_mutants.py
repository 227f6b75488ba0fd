"""Faulty graphs of options: at least one small, plausible bug for each, by surgery on real exports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from tests.verify.surgery import add_constant

Surgery = Callable[[onnx.ModelProto], None]


@dataclass(frozen=True)
class OptionMutant:
    """One bug: its name, the options of the export it is made in, and the surgery, done to every graph."""

    name: str
    options: dict[str, Any] = field(hash=False)
    apply: Surgery = field(hash=False)


def node_named(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    """The node of that name."""
    return next(node for node in model.graph.node if node.name == name)


def first_position(model: onnx.ModelProto) -> None:
    """The head runs on the first position."""
    slice_node = node_named(model, "last_logits/Slice")
    slice_node.input[1] = add_constant(model, np.array([0]))
    slice_node.input[2] = add_constant(model, np.array([1]))


def all_positions(model: onnx.ModelProto) -> None:
    """Every position's logits, although the manifest says the last one's."""
    node_named(model, "last_logits/Slice").input[1] = add_constant(model, np.array([-(1 << 40)]))
    reshape = next(node for node in model.graph.node if "int64_-1_1_96" in node.input)
    reshape.input[1] = "graph/Concat:0"
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "sequence_length"


def least_likely(model: onnx.ModelProto) -> None:
    """The token with the smallest logit."""
    node_named(model, "postprocess/ArgMax").op_type = "ArgMin"


def smallest_first(model: onnx.ModelProto) -> None:
    """The K least likely tokens."""
    node_named(model, "postprocess/TopK").attribute.append(onnx.helper.make_attribute("largest", 0))


def scores_of_the_best(model: onnx.ModelProto) -> None:
    """Scores relative to the best token instead of to all."""
    node_named(model, "postprocess/ReduceLogSumExp").op_type = "ReduceMax"


OPTION_MUTANTS = (
    OptionMutant("the head runs on the first position", {"last_logits": True}, first_position),
    OptionMutant("all positions where one is promised", {"last_logits": True}, all_positions),
    OptionMutant("the least likely token", {"postprocess": "argmax"}, least_likely),
    OptionMutant("the K least likely tokens", {"postprocess": "topk:3", "last_logits": True}, smallest_first),
    OptionMutant("scores relative to the best", {"postprocess": "topk:3", "last_logits": True}, scores_of_the_best),
)
