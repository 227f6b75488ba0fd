"""Finds a wrong attention mask, and describes which tokens see which."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx

from llmconv.tensors import Array
from llmconv.verify.bisect.agreement import HIDDEN
from llmconv.verify.bisect.findings.suspect import Finding, Suspect
from llmconv.verify.bisect.module_scopes import layer_of_scope
from llmconv.verify.bisect.recording import MASK


def mask(suspect: Suspect) -> Finding | None:
    """The first layer whose mask differs from the model's."""
    call = suspect.replay.call
    for name, found, wanted in _pairs(suspect):
        graph, model = np.broadcast_arrays(found, wanted)
        real = call.valid[:, None, :, None]
        more, less = graph & ~model & real, model & ~graph & real
        if more.any() or less.any():
            text = _more_text(suspect, more) if more.any() else _less_text(less)
            return Finding(text, _first(suspect, name))
    return None


def _pairs(suspect: Suspect) -> Iterator[tuple[str, Array, Array]]:
    """Names of masks, their visible keys, and those of the model's mask of the same layer, in order of layers."""
    trace = suspect.trace
    given = {
        layer_of_scope(record.scope): record.exact
        for record in trace.ports
        if record.op == MASK and record.exact.ndim == 4 and layer_of_scope(record.scope) is not None
    }
    for node in trace.index.nodes:
        layer = layer_of_scope(trace.scope(node))
        for name in node.input if layer in given else ():
            maker = trace.index.maker.get(name)
            if maker is None or layer_of_scope(trace.scope(maker)) is not None:
                continue  # masks are computed outside the layers
            found, wanted = _visible(trace.values.get(name)), _visible(given[layer])
            if found is not None and wanted is not None and found.shape[-2:] == wanted.shape[-2:]:
                yield name, found, wanted


def _visible(value: Array | None) -> Array | None:
    """The visible keys, bool [batch or 1, heads or 1, new tokens, all tokens]; None if the value is not a mask."""
    if value is None or value.ndim != 4:
        return None
    if value.dtype.kind == "b":
        return value
    visible: Array = value > HIDDEN
    return visible if value.dtype.kind == "f" and (value <= 0).all() and (value[visible] == 0).all() else None


def _first(suspect: Suspect, name: str) -> onnx.NodeProto | None:
    """The first node that differs; the mask's node if a layer reads the mask of another kind of layer."""
    node = suspect.piece.node if suspect.piece else None
    if node is not None and layer_of_scope(suspect.scope(node)) is None:
        return node
    maker: onnx.NodeProto = suspect.trace.index.maker[name]
    return maker


def _more_text(suspect: Suspect, more: Array) -> str:
    call, total = suspect.replay.call, more.shape[-1]
    rows, _, queries, keys = np.nonzero(more)
    distance = queries + total - more.shape[-2] - keys
    padding = np.pad(call.attention_mask == 0, ((0, 0), (total - call.attention_mask.shape[1], 0)))
    window = getattr(suspect.config, "sliding_window", None)
    if padding[rows, keys].all():
        return "padding is attended to"
    if (distance < 0).all():
        return "a token sees later tokens"
    if window and (distance >= window).all():
        return f"tokens outside the sliding window of {window} are seen"
    return f"token {queries[0]} of sequence {rows[0]} sees token {keys[0]}, but not in the model"


def _less_text(less: Array) -> str:
    rows, _, queries, keys = np.nonzero(less)
    if (keys == queries + less.shape[-1] - less.shape[-2]).all():
        return "a token does not see itself"
    return f"token {queries[0]} of sequence {rows[0]} does not see token {keys[0]}, but does in the model"
