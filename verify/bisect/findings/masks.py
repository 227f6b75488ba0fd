"""Finding on masks: who sees whom, in words, where a layer's mask is not the model's."""

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
    """The first layer that reads a mask unlike the one that the model gives it."""
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
    """Masks by their names, what they show, and what the model's masks of the same layers show, layers in order."""
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
                continue  # a mask is made before the layers
            found, wanted = _visible(trace.values.get(name)), _visible(given[layer])
            if found is not None and wanted is not None and found.shape[-2:] == wanted.shape[-2:]:
                yield name, found, wanted


def _visible(value: Array | None) -> Array | None:
    """Who is seen, bool [batch or 1, heads or 1, new tokens, all tokens]; None of what is no mask."""
    if value is None or value.ndim != 4:
        return None
    if value.dtype.kind == "b":
        return value
    visible: Array = value > HIDDEN
    return visible if value.dtype.kind == "f" and (value <= 0).all() and (value[visible] == 0).all() else None


def _first(suspect: Suspect, name: str) -> onnx.NodeProto | None:
    """The node that differs first; the mask's own where a layer was given the mask of another kind."""
    node = suspect.piece.node if suspect.piece else None
    if node is not None and layer_of_scope(suspect.scope(node)) is None:
        return node
    maker: onnx.NodeProto = suspect.trace.index.maker[name]
    return maker


def _more_text(suspect: Suspect, more: Array) -> str:
    call, total = suspect.replay.call, more.shape[-1]
    rows, _, queries, keys = np.nonzero(more)
    behind = queries + total - more.shape[-2] - keys
    padding = np.pad(call.attention_mask == 0, ((0, 0), (total - call.attention_mask.shape[1], 0)))
    window = getattr(suspect.config, "sliding_window", None)
    if padding[rows, keys].all():
        return "padding is attended to"
    if (behind < 0).all():
        return "a token sees later ones"
    if window and (behind >= window).all():
        return f"tokens behind the sliding window of {window} are seen"
    return f"token {queries[0]} of sequence {rows[0]} sees token {keys[0]}, in the model it does not"


def _less_text(less: Array) -> str:
    rows, _, queries, keys = np.nonzero(less)
    if (keys == queries + less.shape[-1] - less.shape[-2]).all():
        return "a token does not see itself"
    return f"token {queries[0]} of sequence {rows[0]} does not see token {keys[0]}, in the model it does"
