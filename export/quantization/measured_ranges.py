"""Ranges of activations on a text: the smallest and the largest number that a matrix is multiplied with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export.node_editor import NodeEditor, integers
from llmconv.export.quantization.activation_range import ActivationRange
from llmconv.export.quantization.calibration import reduced_inputs
from llmconv.export.quantization.smoothing import Smoothing
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.experts import DOMAIN, GROUPED
from llmconv.export.weights.parameter_sources import WeightSource, leaves
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import Array

HINT = "leave out `--static-activations`"


def measure_ranges(
    traced: TracedGraph,
    matches: Mapping[str, WeightSource],
    tensors: Mapping[str, FileTensor],
    texts: Sequence[Array],
    names: Collection[str],
    smoothing: Smoothing,
) -> dict[str, ActivationRange]:
    """The range of what each matrix is multiplied with, after smoothing, by name.

    Args:
        traced: a float32 graph with a growing cache, its weights still inputs; it is not changed.
        matches: the stored tensors of each weight.
        tensors: the checkpoint's tensors in their files, all in one folder.
        texts: token ids int64 [1, tokens].
        names: of the stored matrices.
        smoothing: factors by which the activations are divided.

    Raises:
        UnsupportedInput: a matrix is one of several experts, or has several inputs or none that can be measured.
        InputRefused: activations are not finite.
        OutOfMemory: memory ran out.
    """
    require_one_input(traced, matches, names)
    found: dict[str, list[Array]] = defaultdict(list)
    for name, extremes in reduced_inputs(traced, matches, tensors, texts, _extremes, names):
        factors = smoothing.matrices.get(name)
        found[name].append(extremes.reshape(2, -1) / (1 if factors is None else factors.ravel()))
    if missing := sorted(set(names) - found.keys()):
        raise UnsupportedInput(f"what `{missing[0]}` is multiplied with cannot be measured", hint=HINT)
    return {name: _range(name, np.stack(extremes)) for name, extremes in found.items()}


def _extremes(editor: NodeEditor, values: ir.Value) -> ir.Value:
    """The smallest numbers of all columns, then the largest: [2 * K]."""
    axis = integers(editor.graph, 0)
    both = [editor.one(name, [values, axis], {"keepdims": 0}) for name in ("ReduceMin", "ReduceMax")]
    return editor.one("Concat", both, {"axis": 0})


def _range(name: str, extremes: Array) -> ActivationRange:
    if not np.isfinite(extremes).all():
        raise InputRefused(
            f"`{name}` is multiplied with values that are not finite on the text", hint=f"check the model, or {HINT}"
        )
    return ActivationRange.of(float(extremes[:, 0].min()), float(extremes[:, 1].max()))


def require_one_input(traced: TracedGraph, matches: Mapping[str, WeightSource], names: Collection[str]) -> None:
    """Refuses matrices of routed experts, and those that several layers share.

    Args:
        traced: a graph, its weights still inputs.
        matches: the stored tensors of each weight.
        names: of the matrices.

    Raises:
        UnsupportedInput: a matrix has no range of its own.
    """
    inputs: dict[str, set[ir.Value | None]] = defaultdict(set)
    for parameter, match in matches.items():
        for name in {leaf.name for leaf in leaves(match)} & set(names):
            for node, _ in traced.weights[parameter].uses():
                inputs[name].add(node.inputs[0])
                if (node.domain, node.op_type) == (DOMAIN, GROUPED):
                    raise UnsupportedInput(
                        f"`{name}` is of routed experts, for which no fixed range of activations is known", hint=HINT
                    )
    if shared := next((name for name, values in inputs.items() if len(values) > 1), ""):
        raise UnsupportedInput(f"several layers share `{shared}`, each with a range of its own", hint=HINT)
