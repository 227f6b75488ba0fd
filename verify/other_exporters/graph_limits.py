"""Limits: which calls a graph cannot run by design, read from its signature and its operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.verify.other_exporters.port_map import Binding
from llmconv.verify.scenarios.calls import Call

GROUPED = "GroupQueryAttention"
BIAS = 10
"""Which of its inputs is the mask as numbers to add; without it the operator only counts the mask's ones."""


@dataclass(frozen=True)
class Limits:
    """What a graph leaves open.

    Attributes:
        rows: sequences of every call, None for any number.
        tokens: new tokens of every call, None for any number.
        takes_mask, takes_positions: it has those inputs.
        counts_mask: the mask tells how long a sequence is, and nothing else.
        keeps_cache: it continues a past.
        rings: what lies in buffers of fixed length that are written round and round, by the names of reports.
        single: several new tokens after a past are for one sequence only.
    """

    rows: int | None
    tokens: int | None
    takes_mask: bool
    takes_positions: bool
    counts_mask: bool
    single: bool
    rings: frozenset[str] = frozenset()
    keeps_cache: bool = True

    @classmethod
    def of(cls, model: onnx.ModelProto, binding: Binding) -> Limits:
        """As the graph declares them."""
        axes = {port.name: _fixed_axes(port) for port in model.graph.input}
        rows, tokens = axes[binding.port_map.tokens]
        grouped = [node for node in nodes(model) if node.op_type == GROUPED]
        biased = all(len(node.input) > BIAS and node.input[BIAS] for node in grouped)
        ringed = {port for node in grouped if _is_ring(node) for port in node.input[3:5]}
        rings = frozenset(name for name, port in binding.past.items() if port in ringed)
        takes = (binding.takes_mask, binding.takes_positions)
        return cls(rows, tokens, *takes, not biased, bool(grouped), rings, keeps_cache=bool(binding.past))

    def refusal(self, call: Call) -> str:
        """Why a call cannot be run; empty when it can."""
        rows = len(call.input_ids)
        if self.rows is not None and rows != self.rows:
            return f"the graph takes {self.rows} sequence(s) at once, not {rows}"
        if not call.uniform and not self.takes_positions:
            return "the graph has no input for positions"
        if call.edit.drop and self.rings:
            return "the graph keeps its sliding layers in rings, of which no token can be taken back"
        if call.known and self.rings:
            return "the graph keeps its sliding layers in rings, which no made-up past fits"
        if call.known and not self.keeps_cache:
            return "the graph takes no past, so none can be made up"
        if call.attention_mask.all():
            return ""
        if not self.takes_mask:
            return "the graph has no input for a mask"
        return f"{GROUPED} only counts the mask's ones, so it knows no padding" if self.counts_mask else ""

    def width(self, rows: int, past: int, new: int) -> int:
        """New tokens of one run."""
        if self.tokens is not None:
            return self.tokens
        return 1 if self.single and rows > 1 and past else new


def _is_ring(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "sliding_window_cache" and attribute.i for attribute in node.attribute)


def _fixed_axes(port: onnx.ValueInfoProto) -> Sequence[int | None]:
    """Sizes of the first two axes, None where they are open."""
    shape = [axis.dim_value or None for axis in port.type.tensor_type.shape.dim]
    return (*shape, None, None)[:2]
