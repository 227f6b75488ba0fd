"""GraphLimits: the calls that a graph does not support, read from its inputs and its operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.verify.other_exporters.port_map import Binding
from llmconv.verify.scenarios.calls import Call

GROUPED = "GroupQueryAttention"
BIAS = 10
"""Index of its input `attention_bias`; without it the operator only counts the ones of the mask."""


@dataclass(frozen=True)
class GraphLimits:
    """Properties of a graph that limit its calls.

    Attributes:
        rows: fixed batch size; None if dynamic.
        tokens: fixed number of new tokens; None if dynamic.
        takes_mask, takes_positions: whether it has those inputs.
        counts_mask: whether it derives only the sequence length from the mask.
        single: whether several new tokens after a past require a batch of 1.
        rings: names, as in reports, of keys and values in ring buffers.
        keeps_cache: whether it continues a past.
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
    def of(cls, model: onnx.ModelProto, binding: Binding) -> GraphLimits:
        """Reads the limits from a graph."""
        axes = {info.name: _fixed_axes(info) for info in model.graph.input}
        rows, tokens = axes[binding.port_map.tokens]
        grouped = [node for node in nodes(model) if node.op_type == GROUPED]
        biased = all(len(node.input) > BIAS and node.input[BIAS] for node in grouped)
        in_rings = {port for node in grouped if _is_ring(node) for port in node.input[3:5]}
        rings = frozenset(name for name, port in binding.past.items() if port in in_rings)
        takes = (binding.takes_mask, binding.takes_positions)
        return cls(rows, tokens, *takes, not biased, bool(grouped), rings, keeps_cache=bool(binding.past))

    def refusal(self, call: Call) -> str:
        """The reason why a call is not supported; else empty."""
        rows = len(call.input_ids)
        if self.rows is not None and rows != self.rows:
            return f"the graph has a batch size of {self.rows}, not {rows}"
        if not call.uniform and not self.takes_positions:
            return "the graph has no input for positions"
        if call.edit.drop and self.rings:
            return "the graph keeps its sliding layers in ring buffers, from which tokens cannot be removed"
        if call.known and self.rings:
            return "the graph keeps its sliding layers in ring buffers, which cannot hold a synthetic past"
        if call.known and not self.keeps_cache:
            return "the graph has no input for a past"
        if call.attention_mask.all():
            return ""
        if not self.takes_mask:
            return "the graph has no input for a mask"
        return f"{GROUPED} only counts the ones of the mask, so padding is not supported" if self.counts_mask else ""

    def width(self, rows: int, past: int, new: int) -> int:
        """New tokens per run, for a batch of `rows` with `past` tokens and `new` new tokens."""
        if self.tokens is not None:
            return self.tokens
        return 1 if self.single and rows > 1 and past else new


def _is_ring(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "sliding_window_cache" and attribute.i for attribute in node.attribute)


def _fixed_axes(info: onnx.ValueInfoProto) -> Sequence[int | None]:
    """Sizes of the first two axes; None if dynamic."""
    shape = [axis.dim_value or None for axis in info.type.tensor_type.shape.dim]
    return (*shape, None, None)[:2]
