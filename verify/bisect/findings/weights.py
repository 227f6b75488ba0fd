"""Finds wrong weights: another tensor, other values, a transposed matrix, a missing bias."""

from __future__ import annotations

import re

import onnx
import torch

from llmconv.verify.bisect.findings.suspect import Finding, Suspect

PRODUCTS = {"Gemm", "MatMul", "FusedMatMul", "FusedGemm", "MatMulNBits"}


def audited(suspect: Suspect) -> Finding | None:
    """A failed weight audit of a tensor that the nodes read."""
    problems = [
        problem
        for check in suspect.checks
        if check.name == "weights" and check.verdict == "fail"
        for problem in check.detail.split("; ")
    ]
    for node in suspect.nodes:
        for problem in problems:
            if set(node.input) & set(re.findall(r"`([^`]+)`", problem)[:1]):
                return Finding(problem, node)
    return None


def other_weight(suspect: Suspect) -> Finding | None:
    """A module that reads the weight of another module."""
    parameters = dict(suspect.replay.model.named_parameters(remove_duplicate=False))
    for node in suspect.nodes:
        own = {name: p for name, p in suspect.module(node).named_parameters(recurse=False)}
        for name in node.input:
            used = parameters.get(name)
            if name not in suspect.weights or used is None or not own or not suspect.scope(node):
                continue
            if not any(used is p or (used.shape == p.shape and torch.equal(used, p)) for p in own.values()):
                wanted = next((key for key, p in own.items() if p.dim() == used.dim()), next(iter(own)))
                return Finding(f"reads `{name}`, the model has `{suspect.scope(node)}.{wanted}` instead", node)
    return None


def transposed(suspect: Suspect) -> Finding | None:
    """A product with a transposed matrix; transformers' Conv1D stores its matrix as (in, out)."""
    for node in suspect.nodes:
        module = suspect.module(node)
        flag = next((a.i for a in node.attribute if a.name == "transB"), 0)
        mapped = len(node.input) > 1 and node.input[1] in suspect.weights
        if node.op_type not in {"Gemm", "FusedMatMul"} or not mapped:
            continue
        rows_out = isinstance(module, torch.nn.Linear)
        if (rows_out or type(module).__name__ == "Conv1D") and bool(flag) != rows_out:
            return Finding(f"`{node.input[1]}` is used transposed", node)
    return None


def missing_bias(suspect: Suspect) -> Finding | None:
    """A module whose bias no node reads."""
    for node in suspect.nodes:
        scope, bias = suspect.scope(node), getattr(suspect.module(node), "bias", None)
        if not scope or not isinstance(bias, torch.Tensor):
            continue
        name = f"{scope}.bias"
        if not any(_adds(other, name, suspect) for other in suspect.trace.index.nodes):
            return Finding(f"no bias in the graph, the model adds `{name}`", node)
    return None


def _adds(node: onnx.NodeProto, name: str, suspect: Suspect) -> bool:
    """Whether a node reads the bias, by its name or by another name in the same module."""
    if name in node.input:
        return True
    return suspect.trace.scopes.of(node) == name.rpartition(".")[0] and any(
        item not in suspect.trace.index.maker and "bias" in item for item in node.input
    )
