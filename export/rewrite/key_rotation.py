"""Finds in a graph how the keys of every layer are rotated."""

from __future__ import annotations

import onnx_ir as ir

from llmconv.export.caches.key_rotation import KeyRotation
from llmconv.export.node_editor import producer
from llmconv.export.rewrite.ort_cpu.rotary import fuse_rotary
from llmconv.export.traced_graph import TracedGraph
from llmconv.runtime.cache_names import past_of

MOVING = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Split", "Slice", "Identity")
"""Operators that move channels and do not compute with them."""


def key_rotations(traced: TracedGraph) -> dict[str, KeyRotation]:
    """The rotation of every layer's keys, by the name of their cache input.

    Args:
        traced: a graph with a growing cache, its weights still inputs; it is not changed.
    """
    fused = traced.copy()
    fuse_rotary(fused)
    outputs = [value for value in fused.model.graph.outputs if (value.name or "").endswith(".key")]
    return {past_of(value.name or ""): _rotation(value) for value in outputs}


def _rotation(present: ir.Value) -> KeyRotation:
    """The rotation of `Concat(past, new)`; unknown where the graph shows neither one whole rotation nor none."""
    joined = producer(present, "Concat")
    new = joined.inputs[-1] if joined else None
    rotary = producer(new, "RotaryEmbedding")
    if rotary is not None:
        if rotary.attributes.get_int("rotary_embedding_dim", 0):
            return KeyRotation.UNKNOWN
        return KeyRotation.NEIGHBORS if rotary.attributes.get_int("interleaved", 0) else KeyRotation.HALVES
    return KeyRotation.NONE if joined and _is_projected(new) else KeyRotation.UNKNOWN


def _is_projected(value: ir.Value | None) -> bool:
    """Whether a value is the result of a linear layer, moved only."""
    while node := producer(value):
        if node.op_type in ("Gemm", "MatMul"):
            return True
        if node.op_type == "Add":
            computed = [given for given in node.inputs if given is not None and given.producer() is not None]
            value = computed[0] if len(computed) == 1 else None
        else:
            value = node.inputs[0] if node.op_type in MOVING else None
    return False
