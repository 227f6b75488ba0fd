"""Mixture of experts: tokens sorted by expert, and one Gemm per expert on the rows that a checkpoint stores.

While tracing, the multiplication by the stacked experts is one custom `GroupedMatMul`, so that the trace does not grow
with the number of experts. When weights are bound, it becomes Split, one Gemm per expert, Concat: an expert without
tokens gets no rows and costs nothing, and every expert is mapped as stored, stacked or separate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llmconv.export.weights.experts import DOMAIN, GROUPED

EXPERTS = "llmconv"


def sorted_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a layer, called through transformers' `ExpertsInterface`.

    Args:
        self: the module of the experts, with stacked weights.
        hidden_states: `[tokens, hidden]`.
        top_k_index: the chosen experts, int64 `[tokens, k]`.
        top_k_weights: their weights, `[tokens, k]`.

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
        f"{DOMAIN}::{GROUPED}",
        [rows, weight, counts],
        {"transB": 0 if module.is_transposed else 1},
        dtype=rows.dtype,
        shape=(rows.shape[0], features),
        version=1,
    )
    return product + getattr(module, f"{name}_bias")[experts] if module.has_bias else product


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, sorted_experts)
