"""Mixture of experts: tokens sorted by expert, one Gemm per expert on the rows that a checkpoint stores.

While tracing, the multiplication by the stacked experts is one `GroupedMatMul` of our own, so the trace does not grow
with the number of experts. When the weights are bound it becomes Split, one Gemm per expert, Concat: an expert that no
token chose gets no rows and costs nothing, and every expert is mapped where it lies, stacked or alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llmconv.export.stored import Expression, Joined, Swapped, element

EXPERTS = "llmconv"
DOMAIN, OP_TYPE = "llmconv", "GroupedMatMul"


def sorted_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' part of a layer, as transformers' `ExpertsInterface` calls it.

    Args:
        self: the experts, their weights stacked.
        hidden_states: `[tokens, hidden]`.
        top_k_index: the chosen experts, `[tokens, k]`; `top_k_weights` likewise.

    Returns:
        `[tokens, hidden]`.
    """
    module: Any = self
    choices = top_k_index.shape[-1]
    experts, order = torch.sort(top_k_index.reshape(-1))
    counts = (experts[:, None] == torch.arange(module.num_experts)).to(torch.int64).sum(0)
    rows = hidden_states[order // choices]
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, name, rows, experts, counts)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _linear(module, "down_proj", inner, experts, counts)
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    weighted = outer * top_k_weights.reshape(-1)[order][:, None]
    by_token = weighted[torch.argsort(order)].reshape(-1, choices, hidden_states.shape[-1])
    return by_token.sum(dim=1).to(hidden_states.dtype)


def _linear(module: Any, name: str, rows: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
    weight = getattr(module, name)
    features = weight.shape[-1] if module.is_transposed else weight.shape[-2]
    product: Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OP_TYPE}",
        [rows, weight, counts],
        {"transB": 0 if module.is_transposed else 1},
        dtype=rows.dtype,
        shape=(rows.shape[0], features),
        version=1,
    )
    return product + getattr(module, f"{name}_bias")[experts] if module.has_bias else product


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, sorted_experts)


def expand_experts(
    model: ir.Model,
    parts: Mapping[ir.Value, Expression],
    value_of: Callable[[Expression], ir.Value],
) -> None:
    """Replaces every `GroupedMatMul` of the graph.

    Args:
        model: changed in place.
        parts: what the stacked weights are made of.
        value_of: the graph's value of an expression.
    """
    for node in list(model.graph):
        if (node.domain, node.op_type) == (DOMAIN, OP_TYPE):
            weight = node.inputs[1]
            assert weight is not None
            _expand(model.graph, node, parts[weight], value_of)
    model.opset_imports.pop(DOMAIN, None)


def _expand(graph: ir.Graph, node: ir.Node, stack: Expression, value_of: Callable[[Expression], ir.Value]) -> None:
    """Split, one Gemm per expert (and per stored part of it), Concat, in the place of one node."""
    rows, _, counts = node.inputs
    number = 0
    experts = range(stack.shape[0])
    transposed = not node.attributes["transB"].as_int()

    def insert(op_type: str, inputs: list[ir.Value | None], attributes: dict[str, int], outputs: int = 1) -> ir.Node:
        nonlocal number
        number += 1
        name = f"{node.name}/{op_type}_{number}"
        made = ir.node(op_type, inputs, attributes=attributes, num_outputs=outputs, name=name)
        for index, output in enumerate(made.outputs):
            output.name = f"{name}:{index}"
        graph.insert_before(node, made)
        return made

    groups = list(insert("Split", [rows, counts], {"axis": 0}, len(experts)).outputs) if len(experts) > 1 else [rows]
    parts = [_parts(element(stack, expert), transposed) for expert in experts]
    columns = []
    for column in range(len(parts[0])):
        products: list[ir.Value | None] = []
        for group, matrices in zip(groups, parts, strict=True):
            matrix, transB = matrices[column]
            products.append(insert("Gemm", [group, value_of(matrix)], {"transB": transB}).outputs[0])
        columns.append(insert("Concat", products, {"axis": 0}).outputs[0])
    result = columns[0] if len(columns) == 1 else insert("Concat", [*columns], {"axis": 1}).outputs[0]
    node.outputs[0].replace_all_uses_with(result)
    graph.remove(node, safe=True)


def _parts(matrix: Expression, transposed: bool) -> list[tuple[Expression, int]]:
    """A matrix cut along its output features into what is stored, each with Gemm's `transB`."""
    if isinstance(matrix, Swapped) and set(matrix.axes) == {0, 1}:
        return _parts(matrix.whole, not transposed)
    if isinstance(matrix, Joined) and not matrix.stack and matrix.axis == int(transposed):
        return [part for each in matrix.parts for part in _parts(each, transposed)]
    return [(matrix, int(not transposed))]
