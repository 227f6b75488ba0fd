"""Locates a failure from the checks: the first layer whose cache differs.

Keys and values of layer k depend only on the layers before k and on the first part of layer k, so the first layer whose
keys or values differ delimits the fault.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmconv.runtime.cache_names import is_state, layer_of
from llmconv.verify.results.report import Check, Where


def localize(checks: Sequence[Check]) -> Where | None:
    """The first failing scenario, its first failing step, and its first differing layer; None if all passed."""
    failed = [check for check in checks if check.verdict == "fail"]
    if not failed:
        return None
    unrun = _text([check for check in failed if not check.output])
    audited = [check for check in failed if check.name == "weights"]
    failed = [check for check in failed if check.output]
    if not failed:
        return _of_weights(audited[0], unrun) if audited else Where("", "", 0, None, "", unrun)
    first = failed[0]
    place = (first.name, first.graph)
    same = [check for check in failed if (check.name, check.graph) == place]
    step = min(check.step for check in same)
    here = [check for check in same if check.step == step]
    first = min(here, key=_depth)
    layer = layer_of(first.output)
    outputs = {check.output for check in here if layer_of(check.output) == layer}
    cached = any(layer_of(check.output) is not None for check in checks if (check.name, check.graph) == place)
    place_text = _place(layer, outputs) if cached else "the logits differ" if first.sigma else ""
    text = "; ".join(part for part in (place_text, first.detail, unrun) if part)
    text = f"{first.name}, {first.graph}, step {step}: {text}"
    return Where(first.name, first.graph, step, layer, first.output, text)


def _text(checks: Sequence[Check]) -> str:
    """The details of checks that run no graph; equal details of several graphs once."""
    graphs: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        graphs.setdefault((check.name, check.detail), []).append(check.graph)
    return "; ".join(f"{name}, {' and '.join(files)}: {detail}" for (name, detail), files in graphs.items())


def _of_weights(check: Check, unrun: str) -> Where:
    """The layer and module of the first tensor in a failed weight audit."""
    tensor = next(iter(re.findall(r"`([^`]+)`", check.detail)), "")
    scope = tensor.rpartition(".")[0]
    found = re.search(r"(?:^|\.)(\d+)\.", tensor)
    layer = int(found[1]) if found else None
    return Where("", check.graph, 0, layer, "", unrun, scope=scope, finding=check.detail)


def _depth(check: Check) -> int:
    layer = layer_of(check.output)
    return 1 << 30 if layer is None else layer


def _place(layer: int | None, outputs: set[str]) -> str:
    if layer is None:
        return "the whole cache agrees, the logits differ: last layer's attention or MLP, final norm, or head"
    if any(is_state(name) for name in outputs):
        return _state_place(layer, outputs)
    kinds = {name.rsplit(".", 1)[1] for name in outputs}
    if kinds == {"key"}:
        return f"layer {layer}, keys only: its key projection, key norm or position encoding"
    if kinds == {"value"}:
        return f"layer {layer}, values only: its value projection"
    if layer == 0:
        return "layer 0, keys and values: the embedding, the first norm or the first projections"
    return (
        f"layer {layer}, keys and values: the attention or MLP of layer {layer - 1}, or the first norm of layer {layer}"
    )


def _state_place(layer: int, outputs: set[str]) -> str:
    if all(name.startswith("present_recurrent.") for name in outputs):
        return f"layer {layer}, recurrent state only: its convolution, its time step or its scan"
    before = "the embedding" if layer == 0 else f"layer {layer - 1} after its scan or attention"
    return (
        f"layer {layer}, {' and '.join(sorted(outputs))}: {before}, or the first norm or projections of layer {layer}"
    )
