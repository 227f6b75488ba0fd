"""AttentionNodes: compares each `GroupQueryAttention` of a graph alone, given what it reads, with its formula.

    code = clip(round(key / scale), -128, 127)
    softmax(softcap(query @ (code * scale) * factor) + bias) @ (code * scale)

Source: onnxruntime docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
import onnx
from onnx import helper

from llmconv.tensors import Array
from llmconv.verify.comparison.cache_copies import LARGEST, LEAST, NEW, PAST, attention_nodes
from llmconv.verify.comparison.graph_probe import GraphProbe
from llmconv.verify.scenarios.calls import Call

QUERY, TOTAL, BIAS = 0, 6, 10
"""Indices of inputs."""

HALF_STEP = 0.501
"""Largest distance of a number from its code, in codes; more than 0.5 for the rounding of the quotient."""
TOLERANCE = 1e-4
"""Largest difference of an output from the formula, as a share of the output."""


@dataclass(frozen=True)
class AttentionNodes:
    """The attention nodes of a graph.

    Attributes:
        probe: reads values of the graph.
        scales: float32 [1, kv_heads, 1, head_dim], by name of the cache input.
    """

    probe: GraphProbe
    scales: Mapping[str, Array]

    @property
    def attention(self) -> list[onnx.NodeProto]:
        """The nodes, in the order of the graph."""
        return attention_nodes(self.probe.model)

    def problems(self, feeds: Mapping[str, Array], call: Call) -> list[str]:
        """What differs in a call, a line per node.

        Args:
            feeds: all inputs of the graph by name.
            call: the tokens and masks among them.

        Raises:
            MalformedInput: onnxruntime cannot run the graph with more outputs.
        """
        names = [node.input[at] for node in self.attention for at in (QUERY, *NEW, TOTAL, BIAS)]
        names += [name for node in self.attention for name in node.output[:3]]
        values = self.probe.read(feeds, list(dict.fromkeys(names)))
        return [one for node in self.attention for one in self._problems_of(node, values, feeds, call)]

    def _problems_of(
        self, node: onnx.NodeProto, values: Mapping[str, Array], feeds: Mapping[str, Array], call: Call
    ) -> list[str]:
        inputs = list(node.input)
        total, new = int(values[inputs[TOTAL]].reshape(-1)[0]), call.input_ids.shape[1]
        dequantized: list[Array] = []
        for at, past, present in zip(NEW, PAST, node.output[1:3], strict=True):
            scale, codes = self.scales[inputs[past]], values[present][:, :, :total]
            if problem := _code_problem(values[inputs[at]], feeds[inputs[past]], codes, scale, total - new):
                return [f"`{present}` {problem}"]
            dequantized.append(codes.astype(np.float64) * scale)
        bias = values[inputs[BIAS]].astype(np.float64) if inputs[BIAS] else np.zeros(1)
        wanted = _attend(node, values[inputs[QUERY]].astype(np.float64), dequantized, bias)
        valid = call.attention_mask[:, total - new :].astype(bool)
        difference = values[node.output[0]].astype(np.float64)[valid] - wanted[valid]
        error, size = (float(np.sqrt(np.mean(one**2))) for one in (difference, wanted[valid]))
        if error <= TOLERANCE * size:
            return []
        share = error / size if size else inf
        return [f"`{node.name}` attends to other keys or values: difference {share:.1g}"]


def _code_problem(new: Array, before: Array, codes: Array, scale: Array, past: int) -> str:
    """What is wrong with the codes [rows, kv_heads, tokens, head_dim] of one buffer; empty if nothing is.

    Args:
        new: the numbers of the new tokens, [rows, tokens, kv_heads * head_dim].
        before: the codes of the buffer before the call.
        codes: those after it.
        scale: of each channel.
        past: number of tokens before the call.
    """
    if not np.array_equal(codes[:, :, :past], before[:, :, :past]):
        return "has other codes for earlier tokens"
    heads, size = scale.shape[1], scale.shape[3]
    numbers = new.astype(np.float64).reshape(*new.shape[:2], heads, size).swapaxes(1, 2) / scale
    wrong = np.abs(np.clip(numbers, LEAST, LARGEST) - codes[:, :, past:]) > HALF_STEP
    return f"has {int(wrong.sum())} codes that are not the nearest to number / scale" if wrong.any() else ""


def _attend(node: onnx.NodeProto, query: Array, cache: list[Array], bias: Array) -> Array:
    """The output [rows, tokens, heads * head_dim] in float64, of keys and values [rows, kv_heads, total, head_dim]."""
    found = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    heads, kv_heads, size = found["num_heads"], found["kv_num_heads"], cache[0].shape[-1]
    rows, new, total = *query.shape[:2], cache[0].shape[2]
    split = query.reshape(rows, new, heads, size).swapaxes(1, 2)
    keys, values = (np.repeat(one, heads // kv_heads, axis=1) for one in cache)
    scores = split @ keys.swapaxes(2, 3) * (found.get("scale") or size**-0.5)
    if softcap := found.get("softcap"):
        scores = np.tanh(scores / softcap) * softcap
    scores = scores + bias
    future = np.arange(total)[None] > np.arange(total - new, total)[:, None]
    scores = np.where(future, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output: Array = (weights / weights.sum(axis=-1, keepdims=True)) @ values
    return output.swapaxes(1, 2).reshape(rows, new, heads * size)
