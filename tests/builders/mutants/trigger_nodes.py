"""Nodes that are put before all others of a graph, to make it wrong in some calls only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from llmconv.tensors import Array
from tests.builders.mutants.surgery import add_constant, replace_input

FLOAT, INT, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
POSITION, LENGTH, BATCH, TOKEN = 3817, 5000, 77, 57


class Nodes:
    """Nodes that are put before all others of a graph.

    Args:
        model: the graph, changed in place.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self._made = model, 0

    def make(self, op: str, *inputs: str | Array | np.generic | int | float, **attributes: Any) -> str:
        """A node; numbers among its inputs become constants. Its output's name."""
        names = [one if isinstance(one, str) else self.constant(one) for one in inputs]
        name = f"model.layers.0/{op}_{900 + len(self.model.graph.node)}"
        self.model.graph.node.insert(self._made, helper.make_node(op, names, [f"{name}:0"], name=name, **attributes))
        self._made += 1
        return f"{name}:0"

    def constant(self, value: Array | np.generic | int | float) -> str:
        """A constant; whole numbers are int64, others float32."""
        kind = np.asarray(value)
        return add_constant(self.model, kind.astype({"i": np.int64, "f": np.float32}.get(kind.dtype.kind, kind.dtype)))

    def axis(self, name: str, at: int) -> str:
        """The size of one axis, as a list of one."""
        return self.make("Shape", name, start=at, end=at + 1)

    def past_length(self) -> str:
        """Tokens in the cache."""
        return self.axis("past_key_values.0.key", 2)

    def total_length(self) -> str:
        """Tokens in the cache and new ones."""
        return self.axis("attention_mask", 1)

    def new_length(self) -> str:
        """New tokens."""
        return self.axis("input_ids", 1)

    def batch(self) -> str:
        """Sequences."""
        return self.axis("input_ids", 0)

    def loud(self, condition: str) -> str:
        """2 where a condition holds, 1 elsewhere; of the condition's shape."""
        return self.make("Add", self.make("Cast", condition, to=FLOAT), 1.0)

    def scale_hidden(self, factor: str) -> None:
        """Multiplies what the first norm reads; the factor is a number or has a number per token."""
        embedding = next(
            node for node in self.model.graph.node if "embed_tokens" in node.name and node.op_type == "Gather"
        )
        hidden, changed = embedding.output[0], "model.layers.0/Mul_900:0"
        readers = [node for node in self.model.graph.node if hidden in node.input]
        at = list(self.model.graph.node).index(embedding) + 1
        node = helper.make_node("Mul", [hidden, factor], [changed], name="model.layers.0/Mul_900")
        self.model.graph.node.insert(at, node)
        for reader in readers:
            replace_input(reader, hidden, changed)

    def scale_each(self, factor: str) -> None:
        """The same with a factor per token, [batch, new tokens]."""
        self.scale_hidden(self.make("Unsqueeze", factor, np.array([2])))


@dataclass(frozen=True)
class Trigger:
    """A fault that shows in some calls only.

    Attributes:
        apply: changes a graph.
    """

    name: str
    apply: Callable[[Nodes], None]
