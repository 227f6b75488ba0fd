"""Graphs of other exporters on scaled weights: their initializers are scaled where the model's tensors are.

See `llmconv.verify.comparison.scaled_weights` for what that shows. A graph is scaled where the audit found every
matrix of the model in it; of quantized ones the scales are scaled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.runtime.onnxruntime.runner import SessionSettings
from llmconv.tensors import Array, LazyTensor
from llmconv.verify.audit.weights import initializer_values
from llmconv.verify.comparison.scaled_graph import scale
from llmconv.verify.other_exporters.content_matching import Content
from llmconv.verify.other_exporters.graph_file import GraphFile
from llmconv.verify.other_exporters.quantized.tensor_matching import Found, Placement
from llmconv.verify.reference.weight_scaling import SCALINGS, WeightScaling


def why_no_scaling(
    contents: Mapping[str, Content], quantized: Sequence[Found], reference: Mapping[str, LazyTensor]
) -> str:
    """Why a graph can have no twin; empty when it can.

    A matrix of unknown content is taken for a table of the graph's own where no tensor of the model has its shape.
    """
    matrices = {name: tensor.shape for name, tensor in reference.items() if len(tensor.shape) > 1}
    found = {name for content in contents.values() if content.matched for name in content.names}
    found |= {name for one in quantized for name in one.names}
    missing = sorted(matrices.keys() - found)
    if missing:
        return f"`{missing[0]}` is not in the graph as it is"
    shapes = {*matrices.values(), *(shape[::-1] for shape in matrices.values())}
    odd = [name for name, content in contents.items() if not content.matched and content.shape in shapes]
    odd += [one.stored.name for one in quantized if not one.whole]
    return f"what `{odd[0]}` holds is unknown" if odd else _why_no_scales(quantized)


def _why_no_scales(quantized: Sequence[Found]) -> str:
    uses = Counter(name for name, _ in {(one.stored.scales, one.stored.name) for one in quantized})
    shared = next((name for name, count in uses.items() if count > 1), "")
    if shared:
        return f"several matrices have the scales `{shared}`"
    for one in quantized:
        if not all(_window(one, placement) for placement in one.placements):
            return f"the tensors in `{one.stored.name}` share scales"
        if any(not _is_exact(one.stored.scale, change.factor) for change in SCALINGS):
            return f"the scales of `{one.stored.name}` are too small to be made smaller"
    return ""


def _is_exact(scales: Array, factor: float) -> bool:
    scaled = scales * scales.dtype.type(factor)
    return bool(np.array_equal(scaled.astype(np.float64), scales.astype(np.float64) * factor))


def _window(one: Found, placement: Placement) -> tuple[slice, slice] | None:
    """Where the scales of a placement are in their grid; None where its neighbours have the same ones."""
    slices = []
    for part, repeat, size in zip(
        (placement.rows, placement.columns), one.stored.repeat, one.stored.shape, strict=True
    ):
        if part.start % repeat or (part.stop % repeat and part.stop != size):
            return None
        slices.append(slice(part.start // repeat, -(-part.stop // repeat)))
    return slices[0], slices[1]


def scaled_foreign(
    settings: SessionSettings,
    file: GraphFile,
    reference: Mapping[str, LazyTensor],
    change: WeightScaling,
    *,
    at_weights: bool = False,
) -> SessionSettings:
    """Settings with which a graph is opened as its twin; `at_weights` as for `scale`."""
    scales = {one.stored.scales: one for one in file.found}

    def apply(path: Path, model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name in scales:
                values = np.array(initializer_values(tensor, path.parent))
                grid = _scaled_grid(values, scales[tensor.name], reference, change)
                tensor.CopyFrom(numpy_helper.from_array(grid, tensor.name))
        factors = {name: _factor(content, reference, change) for name, content in file.contents.items()}
        scale(model, factors, at_weights=at_weights)

    return replace(settings, change=apply)


def _scaled_grid(values: Array, one: Found, reference: Mapping[str, LazyTensor], change: WeightScaling) -> Array:
    """The scales of a quantised matrix, of whichever tensors in it change."""
    grid = values.reshape(one.stored.scale.shape)
    for placement in one.placements:
        factor = change.factor_of(placement.name, reference[placement.name].shape)
        grid[_window(one, placement)] *= values.dtype.type(factor)
    return grid.reshape(values.shape)


def _factor(content: Content, reference: Mapping[str, LazyTensor], change: WeightScaling) -> float | Array:
    """Of an initializer; of one that holds several tensors by rows, or by columns."""
    if content.whole:
        return change.factor_of(content.whole, reference[content.whole].shape)
    if not content.parts:
        return 1.0
    side = not content.covered(False)
    found = np.ones(content.shape[-1 if side else 0])
    done: set[int] = set()
    for part in content.parts:
        rows = [row for row in part.rows if row not in done] if part.side is side else []
        done |= set(rows)
        found[rows] = change.factor_of(part.name, reference[part.name].shape)
    return found if side else found.reshape(-1, *[1] * (len(content.shape) - 1))
