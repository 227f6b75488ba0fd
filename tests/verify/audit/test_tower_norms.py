"""Epsilons of norms in a vision graph: another one is found, whatever it changes in the features."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from torch import nn

from llmconv.verify.audit.structure import check_tower_norms


class Tower(nn.Module):
    """Two norms with an epsilon each, and the decoder's, which has another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(4, eps=1e-6), nn.LayerNorm(4, eps=1e-4)
        self.language_model = nn.LayerNorm(4, eps=1e-3)


def graph() -> onnx.ModelProto:
    """The first norm as an operator, the second as primitive operators."""
    floats = {"inner": [1e-4]}
    nodes = [
        onnx.helper.make_node("LayerNormalization", ["x", "scale"], ["y"], "first/LayerNormalization", epsilon=1e-6),
        onnx.helper.make_node("Add", ["y", "inner"], ["z"], "second/Add"),
        onnx.helper.make_node("Sqrt", ["z"], ["out"], "second/Sqrt"),
    ]
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("x", "scale", "out")]
    constants = [onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [1], value) for name, value in floats.items()]
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "tower", values[:2], values[2:], constants))


def halved(model: onnx.ModelProto) -> None:
    """Another epsilon as an attribute."""
    model.graph.node[0].attribute[0].f /= 2


def left_out(model: onnx.ModelProto) -> None:
    """The operator's default."""
    del model.graph.node[0].attribute[:]


def of_the_other_norm(model: onnx.ModelProto) -> None:
    """An epsilon that another norm of the tower has."""
    model.graph.node[0].attribute[0].f = 1e-4


def of_the_decoder(model: onnx.ModelProto) -> None:
    """An epsilon that only the decoder has, in primitive operators without a module's name."""
    model.graph.initializer[0].float_data[0] = 1e-3
    model.graph.node[2].name = "Sqrt"


@pytest.mark.parametrize("change", [halved, left_out, of_the_other_norm, of_the_decoder], ids=lambda one: one.__name__)
def test_another_epsilon_is_found(change: Callable[[onnx.ModelProto], None]) -> None:
    model = graph()
    assert check_tower_norms("vision.onnx", model, Tower()).verdict == "pass"
    change(model)
    assert check_tower_norms("vision.onnx", model, Tower()).verdict == "fail"
