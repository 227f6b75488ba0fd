"""Finds wrong numbers: epsilon, product factors, attention scale, softcaps, sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx

from llmconv.verify.bisect.findings.suspect import Finding, Suspect, differ, difference

EPSILONS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
"""Names of the epsilon in norm modules."""

SCALES = ("scaling", "scale", "inv_norm_factor", "softmax_scale", "scale_attn")
"""Names of the factor of the scores in attention modules."""

TINY = 1e-2
"""Added numbers smaller than this are epsilons."""


def epsilon(suspect: Suspect) -> Finding | None:
    """A norm's epsilon, as an attribute or an added number."""
    added = ((node, value) for node, value in suspect.scalars("Add") if 0 <= value < TINY)
    for node, found in (*suspect.attributes("epsilon"), *added):
        wanted = _held(suspect.module(node), EPSILONS)
        if wanted is not None and differ(found, wanted):
            return Finding(difference("epsilon", found, wanted), node)
    return None


def product_factor(suspect: Suspect) -> Finding | None:
    """A matrix product or bias with a factor other than 1."""
    for node, found in suspect.attributes("alpha", "beta"):
        if node.op_type in {"Gemm", "FusedMatMul", "FusedGemm"} and differ(found, 1.0):
            return Finding(difference("factor of the product or of its bias", found, 1.0), node)
    return None


def attention_scale(suspect: Suspect) -> Finding | None:
    """The factor of the attention scores, as an attribute or a multiplied number."""
    for node, found in (*suspect.attributes("scale"), *_score_factors(suspect)):
        wanted = _wanted_scale(suspect, node)
        if wanted is not None and found and differ(found, wanted):
            return Finding(difference("attention scale", found, wanted), node)
    return None


def _score_factors(suspect: Suspect) -> Iterator[tuple[onnx.NodeProto, float]]:
    """Numbers that matrix products are multiplied by."""
    for node, value in suspect.scalars("Mul", "Div"):
        makers = [suspect.trace.index.maker.get(name) for name in node.input]
        if any(maker is not None and maker.op_type == "MatMul" for maker in makers) and value:
            yield node, value if node.op_type == "Mul" else 1 / value


def _wanted_scale(suspect: Suspect, node: onnx.NodeProto) -> float | None:
    module = suspect.module(node)
    held = _held(module, SCALES)
    if held is not None:
        return held
    size = _held(module, ("head_dim",))
    return size**-0.5 if size else None


def attention_softcap(suspect: Suspect) -> Finding | None:
    """The softcap of attention scores; none without the attribute."""
    wanted = getattr(suspect.config, "attn_logit_softcapping", None) or 0.0
    found = {id(node): value for node, value in suspect.attributes("softcap")}
    for node in suspect.nodes:
        if node.op_type in {"Attention", "GroupQueryAttention"}:
            value = found.get(id(node), 0.0)
            if differ(value, wanted):
                return Finding(difference("attention softcap", value, wanted), node)
    return None


def final_softcap(suspect: Suspect) -> Finding | None:
    """The softcap of the logits, which divides them before the tanh and multiplies them after it."""
    wanted = getattr(suspect.config, "final_logit_softcapping", None)
    if not wanted or not suspect.nodes:
        return None
    for node, found in suspect.scalars("Div", "Mul"):
        if _is_next_to_tanh(suspect, node) and differ(found, wanted) and differ(1 / found, wanted):
            return Finding(difference("final softcap", found, wanted), node)
    return None


def _is_next_to_tanh(suspect: Suspect, node: onnx.NodeProto) -> bool:
    index = suspect.trace.index
    makers = [index.maker.get(name) for name in node.input]
    users = [user for name in node.output for user in index.users[name]]
    return any(other is not None and other.op_type == "Tanh" for other in (*makers, *users))


def sliding_window(suspect: Suspect) -> Finding | None:
    """The window size of sliding layers."""
    wanted = getattr(suspect.config, "sliding_window", None)
    if not wanted:
        return None
    counted = [(node, abs(value)) for node, value in suspect.scalars("Sub", "Add") if _is_integer(suspect, node)]
    for node, found in (*suspect.attributes("local_window_size"), *counted):
        if found > 1 and found not in (wanted, wanted - 1):
            return Finding(difference("sliding window", found, wanted), node)
    return None


def _is_integer(suspect: Suspect, node: onnx.NodeProto) -> bool:
    value = suspect.trace.values.get(node.output[0])
    return value is not None and value.dtype.kind == "i"


def _held(module: Any, names: tuple[str, ...]) -> float | None:
    """The first numeric attribute of a module among these names."""
    values = (getattr(module, name, None) for name in names)
    return next(
        (float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)), None
    )
