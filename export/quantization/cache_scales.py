"""Scales of a cache of integer codes: for each channel, 1.1 * the largest magnitude on a text / 127.

Channels of keys that a rotary embedding mixes share a scale, see `caches.key_rotation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export.caches.key_rotation import KeyRotation
from llmconv.export.node_editor import NodeEditor, integers
from llmconv.export.quantization.calibration import outputs_on_texts
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.bind import bind
from llmconv.export.weights.parameter_sources import WeightSource
from llmconv.files.safetensors_file import FileTensor
from llmconv.runtime.cache_names import is_present, past_of
from llmconv.tensors import Array

HEADROOM = 1.1
"""Other texts exceed the range: measured, a tenth more than the range on the text costs least."""

LARGEST = 127
"""The largest code; -128 is left out, so that codes are symmetric."""

MAXIMA = "largest:"
"""Prefix of the outputs with maxima; the rest is the name of the cache input."""


def measure_cache_scales(
    traced: TracedGraph,
    matches: Mapping[str, WeightSource],
    tensors: Mapping[str, FileTensor],
    texts: Sequence[Array],
    rotations: Mapping[str, KeyRotation],
) -> dict[str, Array]:
    """Scales by name of the cache input: float32 [1, kv_heads, 1, head_dim].

    Args:
        traced: a float32 graph with a growing cache, its weights still inputs; it is not changed.
        matches: the stored tensors of each weight.
        tensors: the checkpoint's tensors in their files, all in one folder.
        texts: token ids int64 [1, tokens].
        rotations: of keys, by name of the cache input.

    Raises:
        UnsupportedInput: the graph takes embeddings, or onnxruntime cannot map the weights.
        InputRefused: keys or values are not finite.
        OutOfMemory: memory ran out.
    """
    if traced.spec.embeddings:
        raise UnsupportedInput(
            "`--calibrate` needs graphs that take tokens, not embeddings", hint="leave out `--kv-cache int8`"
        )
    observed = traced.copy()
    bind(observed, matches, tensors)
    maxima: dict[str, Array] = {}
    for output, found in outputs_on_texts(_observing(observed), next(iter(tensors.values())).path.parent, texts):
        name = output.removeprefix(MAXIMA)
        maxima[name] = np.maximum(maxima[name], found) if name in maxima else found
    return {name: _scale(name, found, rotations.get(name, KeyRotation.NONE)) for name, found in maxima.items()}


def _observing(traced: TracedGraph) -> onnx.ModelProto:
    """The graph with the largest magnitude per channel of keys and values as its only outputs."""
    graph = traced.model.graph
    outputs: list[ir.Value] = []
    for value in [value for value in graph.outputs if is_present(value.name or "")]:
        name = past_of(value.name or "")
        editor = NodeEditor(graph, None, f"largest/{name}")
        found = editor.one("ReduceMax", [editor.one("Abs", [value]), integers(graph, 0, 2)], {"keepdims": 1})
        found.name, found.type, found.shape = MAXIMA + name, ir.TensorType(ir.DataType.FLOAT), ir.Shape([None] * 4)
        outputs.append(found)
    graph.outputs[:] = outputs
    return ir.to_proto(traced.model)


def _scale(name: str, maxima: Array, rotation: KeyRotation) -> Array:
    if not np.isfinite(maxima).all():
        raise InputRefused(
            f"`{name}` has values that are not finite on the text", hint="check the model, or leave out `--kv-cache`"
        )
    shared = rotation.shared(maxima)
    return (np.where(shared > 0, shared, 1) * HEADROOM / LARGEST).astype(np.float32)
