"""Faulty graphs that are right for most calls: logits are 1 % off where a condition on sizes or positions holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Sizes:
    """The sizes of a call, as values of the graph that is to be changed.

    Attributes:
        rows, new, total, past: sequences, new tokens, all tokens, and those in the cache.
        padding: zeros of the mask in its last row.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.nodes = model, list[onnx.NodeProto]()
        ids, mask = (self.node("Shape", name) for name in ("input_ids", "attention_mask"))
        self.rows, self.new = (self.node("Gather", ids, self.number(at)) for at in (0, 1))
        self.total = self.node("Gather", mask, self.number(1))
        self.past = self.total - self.new
        self.padding = self.total - self.node(
            "ReduceSum", self.node("Gather", "attention_mask", self.number(-1)), keep=0
        )

    def number(self, value: int) -> str:
        """A constant."""
        name = f"trigger_{len(self.model.graph.initializer)}"
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype=np.int64), name))
        return name

    def node(self, op: str, *inputs: Value | str | int, keep: int | None = None) -> Value:
        """A new node; integers become constants."""
        output = f"trigger/{op}_{len(self.nodes)}"
        names = [self.number(item) if isinstance(item, int) else str(item) for item in inputs]
        self.nodes.append(helper.make_node(op, names, [output], name=output))
        if keep is not None:
            self.nodes[-1].attribute.append(helper.make_attribute("keepdims", keep))
        return Value(self, output)

    def has_position(self, position: int) -> Value:
        """Whether some token is there."""
        found = self.node("Cast", self.node("Equal", "position_ids", position))
        self.nodes[-1].attribute.append(helper.make_attribute("to", TensorProto.INT64))
        return self.node("ReduceMax", found, keep=0) > 0


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the graph, to be calculated with."""

    sizes: Sizes
    name: str

    def __str__(self) -> str:
        return self.name

    def __sub__(self, other: Value) -> Value:
        return self.sizes.node("Sub", self, other)

    def __mod__(self, other: int) -> Value:
        return self.sizes.node("Mod", self, other)

    def __gt__(self, other: int) -> Value:
        return self.sizes.node("Greater", self, other)

    def __lt__(self, other: int) -> Value:
        return self.sizes.node("Less", self, other)

    def __and__(self, other: Value) -> Value:
        return self.sizes.node("And", self, other)

    def equals(self, other: int) -> Value:
        """Whether it is this number."""
        return self.sizes.node("Equal", self, other)


Condition = Callable[[Sizes], Value]


def within(value: Value, first: int, last: int) -> Value:
    """Whether a number lies between two, both included."""
    return (value > first - 1) & (value < last + 1)


@dataclass(frozen=True)
class Trigger:
    """One fault.

    Attributes:
        name: says when it is met.
        condition: the same as values of the graph.
        met_by: a scenario that meets it.
    """

    name: str
    condition: Condition
    met_by: str

    def apply(self, model: onnx.ModelProto, folder: Path) -> bool:
        """Makes logits 1 % too large where the condition holds."""
        sizes = Sizes(model)
        wrong, right = (f"trigger_{name}" for name in ("wrong", "right"))
        for name, factor in ((wrong, 1.01), (right, 1.0)):
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(factor, dtype=np.float32), name))
        factor_name = str(sizes.node("Where", self.condition(sizes), wrong, right))
        for node in model.graph.node:
            node.output[:] = ["trigger_logits" if name == "logits" else name for name in node.output]
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend([*sizes.nodes, *nodes])
        model.graph.node.append(
            helper.make_node("Mul", ["trigger_logits", factor_name], ["logits"], name="trigger/mul")
        )
        return True


def _none(value: Value) -> Value:
    return value.equals(0)


PIECES = "chunked prefill, pieces of 1 to 48 tokens"
PASTS = "pasts of 30 to 1,022 tokens"
BATCH = "batch of 6"
POSITIONS = "positions over the whole context"
EVERY_NUMBER = "every number of new tokens, 1 to 48"

TRIGGERS = (
    Trigger("a prompt of 24 to 47 tokens", lambda s: _none(s.past) & within(s.new, 24, 47), "prefill, 33 tokens"),
    Trigger("a past of 24 to 63 tokens", lambda s: within(s.past, 24, 63), PIECES),
    Trigger("24 to 63 tokens in all", lambda s: within(s.total, 24, 63), PIECES),
    Trigger("4 sequences", lambda s: s.rows.equals(4), "one-token prompt"),
    Trigger("5 sequences", lambda s: s.rows.equals(5), "first and last token"),
    Trigger("more than 5 sequences", lambda s: s.rows > 5, BATCH),
    Trigger("a step of 6 sequences", lambda s: s.rows.equals(6) & s.new.equals(1), BATCH),
    Trigger("several tokens after a past, 6 sequences", lambda s: s.rows.equals(6) & (s.new > 1) & (s.past > 0), BATCH),
    Trigger("position 77", lambda s: s.has_position(77), POSITIONS),
    Trigger("position 125", lambda s: s.has_position(125), POSITIONS),
    Trigger("a past of a multiple of 64", lambda s: _none(s.past % 64) & (s.past > 0), PASTS),
    Trigger("two tokens after more than 30", lambda s: s.new.equals(2) & (s.past > 30), PASTS),
    Trigger("a step after more than 60", lambda s: s.new.equals(1) & (s.past > 60), PASTS),
    Trigger("13 tokens after a past", lambda s: s.new.equals(13) & (s.past > 0), PIECES),
    Trigger("32 tokens after a past", lambda s: s.new.equals(32) & (s.past > 0), PIECES),
    Trigger("more than 100 tokens in all", lambda s: s.total > 100, PIECES),
    Trigger("more than 4 masked tokens in the last row", lambda s: s.padding > 4, BATCH),
    Trigger("a prompt of 20 tokens", lambda s: _none(s.past) & s.new.equals(20), EVERY_NUMBER),
    Trigger("a prompt of 47 tokens", lambda s: _none(s.past) & s.new.equals(47), EVERY_NUMBER),
    Trigger("17 tokens after a past", lambda s: s.new.equals(17) & (s.past > 0), EVERY_NUMBER),
    Trigger("41 tokens after a past", lambda s: s.new.equals(41) & (s.past > 0), EVERY_NUMBER),
    Trigger("a prompt of 5 sequences", lambda s: s.rows.equals(5) & _none(s.past), "every batch size, 1 to 6"),
    Trigger("a step after 47 tokens", lambda s: s.new.equals(1) & s.past.equals(47), "decode chain, 64 steps"),
    Trigger(
        "two tokens after 94",
        lambda s: s.new.equals(2) & s.past.equals(94),
        "pasts of 14 tokens to the end of the context",
    ),
    Trigger("position 50 of many", lambda s: s.has_position(50) & (s.new > 48), "every position of the context"),
)
"""For models with a context of 128 tokens."""
