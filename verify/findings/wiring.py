"""Findings on wires: masks, caches and outputs of another place, a term that is missing, another constant."""

from __future__ import annotations

import numpy as np
import onnx

from llmconv.runtime.cache_names import layer_of
from llmconv.tensors import Array
from llmconv.verify.agreement import HIDDEN
from llmconv.verify.findings.suspect import Suspect
from llmconv.verify.recording import MASK
from llmconv.verify.scopes import layer_of_scope


def mask(suspect: Suspect) -> str:
    """Who sees whom, where the mask of an attention is not the model's."""
    found = _graph_mask(suspect)
    wanted = _model_mask(suspect, found)
    if found is None or wanted is None:
        return ""
    found, wanted = np.broadcast_arrays(found, wanted)
    real = suspect.replay.call.valid[:, None, :, None]
    more, less = found & ~wanted & real, wanted & ~found & real
    if not more.any() and not less.any():
        return ""
    return _more_told(suspect, more) if more.any() else _less_told(less)


def _more_told(suspect: Suspect, more: Array) -> str:
    call = suspect.replay.call
    tokens, total = more.shape[-2:]
    row, _, query, key = (int(axis[0]) for axis in np.nonzero(more))
    keys = np.nonzero(more)[3]
    queries = np.nonzero(more)[2] + total - tokens
    padding = np.pad(call.attention_mask == 0, ((0, 0), (total - call.attention_mask.shape[1], 0)))
    if padding[np.nonzero(more)[0], keys].all():
        return "padding is attended to"
    if (keys > queries).all():
        return "a token sees later ones"
    window = getattr(suspect.config, "sliding_window", None)
    if window and (queries - keys >= window).all():
        return f"tokens behind the sliding window of {window} are seen"
    return f"token {query} of sequence {row} sees token {key}, in the model it does not"


def _less_told(less: Array) -> str:
    tokens, total = less.shape[-2:]
    row, _, query, key = (int(axis[0]) for axis in np.nonzero(less))
    if (np.nonzero(less)[3] == np.nonzero(less)[2] + total - tokens).all():
        return "a token does not see itself"
    return f"token {query} of sequence {row} does not see token {key}, in the model it does"


def _graph_mask(suspect: Suspect) -> Array | None:
    """What is visible in the graph, bool [batch or 1, heads or 1, new tokens, all tokens]."""
    tokens = suspect.replay.call.input_ids.shape[1]
    total = suspect.replay.virtual + suspect.replay.call.attention_mask.shape[1]
    for node in reversed(_and_users(suspect)):
        for name in (*node.output, *node.input):
            value = suspect.trail.values.get(name)
            if value is not None and value.ndim == 4 and value.shape[-2:] == (tokens, total):
                visible = _visible(value)
                if visible is not None:
                    return visible
    return None


def _and_users(suspect: Suspect) -> list[onnx.NodeProto]:
    """The suspects and what follows them, in order."""
    found = {id(node): node for node in suspect.nodes}
    for node in suspect.trail.wiring.nodes:
        if any(id(maker) in found for name in node.input if (maker := suspect.trail.wiring.maker.get(name))):
            found[id(node)] = node
            if len(found) > 40:
                break
    return [node for node in found.values() if node.op_type in MASK_OPS]


MASK_OPS = {"Attention", "GroupQueryAttention", "MultiHeadAttention", "Where", "And", "Less", "LessOrEqual", "Greater"}
MASK_OPS |= {"GreaterOrEqual", "Add"}


def _visible(value: Array) -> Array | None:
    if value.dtype.kind == "b":
        return value
    if value.dtype.kind == "f" and (value < HIDDEN).any() and set(np.unique(value > HIDDEN / 2)) and (value <= 0).all():
        result: Array = value > HIDDEN
        return result
    return None


def _model_mask(suspect: Suspect, found: Array | None) -> Array | None:
    """The same in the model, for the layer that differs first."""
    layer = suspect.where.layer or 0
    masks = [record for record in suspect.trail.ports if record.op == MASK and record.exact.ndim == 4]
    masks.sort(key=lambda record: abs((layer_of_scope(record.scope) or 0) - layer))
    if found is None or not masks or masks[0].exact.shape[-2:] != found.shape[-2:]:
        return None
    return _visible(masks[0].exact) if masks[0].exact.dtype.kind == "b" else masks[0].exact > HIDDEN


def other_cache(suspect: Suspect) -> str:
    """A layer that reads the cache of another."""
    for node in suspect.nodes:
        own = layer_of_scope(suspect.scope(node))
        for name in node.input:
            layer = layer_of(name)
            if layer is not None and own is not None and layer != own and name in suspect.replay.feeds:
                return f"reads `{name}`, the cache of layer {layer}"
    return ""


def missing_term(suspect: Suspect) -> str:
    """A node that hands on one of the terms that the model adds."""
    for node in suspect.nodes:
        if node.op_type == "Identity" and suspect.piece and suspect.piece.expected is not None:
            op = suspect.piece.expected.op
            if "add" in op:
                return f"hands on `{node.input[0]}` alone, the model adds to it"
    return ""


def other_output(suspect: Suspect) -> str:
    """Outputs under each other's names: every node is right, but not what its value is called."""
    if suspect.piece:
        return ""
    outputs = suspect.replay.outputs()
    name = suspect.where.output
    found = suspect.trail.values.get(name)
    for other, record in outputs.items() if found is not None else ():
        if found is not None and other != name and suspect.trail.comparison.agrees(record, found):
            return f"`{name}` holds what the model has as `{other}`"
    return ""


def constant(suspect: Suspect) -> str:
    """A number that the model has not, where a nearby one is in the model's own step."""
    for node in suspect.nodes[:1]:
        for name in node.input:
            value = suspect.constant(name)
            if value is not None and value.size == 1 and value.dtype.kind == "f":
                return f"`{node.name}` has the constant {float(value.reshape(())):.8g}"
    return ""
