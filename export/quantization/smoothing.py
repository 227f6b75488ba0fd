"""Smoothing: factors that move the range of activations into the weights they are multiplied with (`--calibrate`).

A channel with outliers makes the one scale of an activation coarse for all others. So the norm that makes it is divided
by a factor per channel, and the columns of the matrices behind it are multiplied with the same one:
`s = max|x| ** 0.5 / max|w| ** 0.5` (SmoothQuant, Xiao et al., arXiv:2211.10438, equation 4, alpha 0.5), rounded to a
power of two, so that both are exact in floating point and the model stays the same function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from llmconv.errors import InputRefused
from llmconv.export.node_editor import NodeEditor, integers
from llmconv.export.quantization.calibration import reduced_inputs
from llmconv.export.quantization.column_factors import FLOAT32, stored_factors
from llmconv.export.quantization.smoothing_groups import SmoothingGroup
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.parameter_sources import WeightSource
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import Array, DType, LazyTensor, in_memory

LARGEST = 24
"""The largest exponent of a factor, positive or negative."""


@dataclass(frozen=True)
class Smoothing:
    """Powers of two by names of stored tensors, float32, which broadcast over them.

    Matrices are multiplied with their factors, [K], or [K, 1] for a matrix that is stored as [K, N], before they are
    rounded; norms are divided by theirs, [K].
    """

    matrices: Mapping[str, Array] = field(default_factory=dict)
    norms: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Iterable[tuple[SmoothingGroup, Array]]) -> Smoothing:
        """The factors [K] of groups."""
        matrices: dict[str, Array] = {}
        norms: dict[str, Array] = {}
        for group, factors in found:
            matrices |= {name: factors[:, None] if turned else factors for name, turned in group.matrices}
            norms |= dict.fromkeys(group.norms, factors)
        return cls(matrices, norms)

    def norm(self, name: str, tensor: LazyTensor) -> dict[str, LazyTensor]:
        """The quotient of a vector and its factors in float32, and the factors, by name."""
        factors = self.norms[name]
        quotient = (tensor.read().astype(np.float32) / factors).astype(np.float32)
        return {name: in_memory(quotient, FLOAT32), **stored_factors(name, factors)}


def measure_smoothing(
    groups: Sequence[SmoothingGroup],
    traced: TracedGraph,
    matches: Mapping[str, WeightSource],
    tensors: Mapping[str, FileTensor],
    texts: Sequence[Array],
) -> Smoothing:
    """The factors of all groups; reads their weights once.

    `traced` is a float32 graph with a growing cache, its weights still inputs, and is not changed. `tensors` are in
    files of one folder, `texts` token ids int64 [1, tokens].

    Raises:
        UnsupportedInput: the graph takes embeddings, or onnxruntime cannot map the weights.
        InputRefused: activations are not finite.
        OutOfMemory: memory ran out.
    """
    wanted = {group.matrices[0][0] for group in groups}
    largest: dict[str, Array] = {}
    for name, found in reduced_inputs(traced, matches, tensors, texts, _largest, wanted):
        largest[name] = np.maximum(largest[name], found) if name in largest else found
    measured = [(group, group.matrices[0][0]) for group in groups if group.matrices[0][0] in largest]
    return Smoothing.of((group, _factors(largest[name], group, tensors)) for group, name in measured)


def _largest(editor: NodeEditor, values: ir.Value) -> ir.Value:
    return editor.one("ReduceMax", [editor.one("Abs", [values]), integers(editor.graph, 0)], {"keepdims": 0})


def require_finite(name: str, values: Array) -> None:
    """Raises InputRefused if `values`, from activations that matrix `name` multiplies, are not all finite."""
    if not np.isfinite(values).all():
        raise InputRefused(
            f"`{name}` is multiplied with values that are not finite on the text",
            hint="check the model, or leave out `--calibrate`",
        )


def _factors(inputs: Array, group: SmoothingGroup, tensors: Mapping[str, LazyTensor]) -> Array:
    """Powers of two float32 [K]; 1 where a channel is zero, or the norm's quotient would be rounded."""
    require_finite(group.matrices[0][0], inputs)
    weights = np.zeros(inputs.shape, np.float32)
    for name, turned in group.matrices:
        tensor = tensors[name]
        for start, stop in tensor.blocks():
            rows = np.abs(tensor.rows(start, stop).astype(np.float32))
            part = weights[start:stop] if turned else weights
            np.maximum(part, rows.max(axis=1 if turned else 0), out=part)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = (np.log2(inputs) - np.log2(weights)) / 2
    return exact_factors(exponents, group, tensors, FLOAT32)


def exact_factors(exponents: Array, group: SmoothingGroup, tensors: Mapping[str, LazyTensor], dtype: DType) -> Array:
    """Powers of two float32 [K]; 1 where the exponent is not finite, or the norm's quotient would be rounded.

    Exponents [K] are rounded to the nearest integers; the graphs have the group's norm in `dtype`.
    """
    whole = np.clip(np.rint(exponents), -LARGEST, LARGEST)
    factors = np.ldexp(np.float32(1), np.where(np.isfinite(whole), whole, 0).astype(np.int32))
    for name in group.norms:
        values = tensors[name].read().astype(np.float32)
        for kind in (FLOAT32, dtype):
            with np.errstate(all="ignore"):
                quotients = (values / factors).astype(kind.numpy).astype(np.float32)
                is_exact = quotients * factors == values.astype(kind.numpy).astype(np.float32)
            factors = np.where(is_exact, factors, np.float32(1))
    return factors.astype(np.float32)
