"""External graphs with scaled weights: their initializers are scaled like the model's tensors.

See `llmconv.verify.comparison.scaled_weights` for the purpose. A graph can be scaled if the audit found every matrix of
the model in it; of quantized matrices, the scales are scaled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.tensors import Array, LazyTensor
from llmconv.verify.audit.weights import initializer_values
from llmconv.verify.comparison.scaled_graph import scale
from llmconv.verify.other_exporters.content_matching import InitializerContent
from llmconv.verify.other_exporters.graph_file import GraphFile
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix, TensorMatch
from llmconv.verify.reference.weight_scaling import SCALINGS, WeightScaling


def why_not_scalable(
    contents: Mapping[str, InitializerContent], quantized: Sequence[MatchedMatrix], reference: Mapping[str, LazyTensor]
) -> str:
    """The reason why a graph cannot be scaled; else empty.

    A matrix of unknown content is assumed to be a table of the graph if no tensor of the model has its shape.

    Args:
        contents: the initializers by name, see `match_contents`.
        quantized: the quantized matrices.
        reference: tensors of the model by name.
    """
    matrices = {name: tensor.shape for name, tensor in reference.items() if len(tensor.shape) > 1}
    found = {name for content in contents.values() if content.matched for name in content.names}
    found |= {name for one in quantized for name in one.names}
    missing = sorted(matrices.keys() - found)
    if missing:
        return f"`{missing[0]}` was not found in the graph"
    shapes = {*matrices.values(), *(shape[::-1] for shape in matrices.values())}
    odd = [name for name, content in contents.items() if not content.matched and content.shape in shapes]
    odd += [one.stored.name for one in quantized if not one.whole]
    return f"the content of `{odd[0]}` is unknown" if odd else _why_scales_are_not_scalable(quantized)


def _why_scales_are_not_scalable(quantized: Sequence[MatchedMatrix]) -> str:
    uses = Counter(name for name, _ in {(one.stored.scales, one.stored.name) for one in quantized})
    shared = next((name for name, count in uses.items() if count > 1), "")
    if shared:
        return f"several matrices share the scales `{shared}`"
    for one in quantized:
        if not all(_window(one, match) for match in one.matches):
            return f"the tensors in `{one.stored.name}` share scales"
        if any(not _is_exact(one.stored.scale, change.factor) for change in SCALINGS):
            return f"the scales of `{one.stored.name}` are too small to be made smaller"
    return ""


def _is_exact(scales: Array, factor: float) -> bool:
    scaled = scales * scales.dtype.type(factor)
    return bool(np.array_equal(scaled.astype(np.float64), scales.astype(np.float64) * factor))


def _window(one: MatchedMatrix, match: TensorMatch) -> tuple[slice, slice] | None:
    """The window of a match in the grid of scales; None if its neighbors share scales with it."""
    slices = []
    for part, repeat, size in zip((match.rows, match.columns), one.stored.repeat, one.stored.shape, strict=True):
        if part.start % repeat or (part.stop % repeat and part.stop != size):
            return None
        slices.append(slice(part.start // repeat, -(-part.stop // repeat)))
    return slices[0], slices[1]


def scaled_settings(
    settings: SessionSettings,
    file: GraphFile,
    reference: Mapping[str, LazyTensor],
    change: WeightScaling,
    *,
    at_weights: bool = False,
) -> SessionSettings:
    """Session settings that scale the weights when a graph is opened.

    Args:
        settings: settings of the unscaled graph.
        file: the graph.
        reference: tensors of the model by name.
        change: the factors.
        at_weights: as for `scale`.
    """
    scales = {one.stored.scales: one for one in file.quantized_weights}

    def apply(path: Path, model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name in scales:
                values = np.array(initializer_values(tensor, path.parent))
                grid = _scaled_grid(values, scales[tensor.name], reference, change)
                tensor.CopyFrom(numpy_helper.from_array(grid, tensor.name))
        factors = {name: _factor(content, reference, change) for name, content in file.contents.items()}
        scale(model, factors, at_weights=at_weights)

    return replace(settings, change=apply)


def _scaled_grid(
    values: Array, one: MatchedMatrix, reference: Mapping[str, LazyTensor], change: WeightScaling
) -> Array:
    """The scales of a quantized matrix, multiplied by the factors of its tensors."""
    grid = values.reshape(one.stored.scale.shape)
    for match in one.matches:
        factor = change.factor_of(match.name, reference[match.name].shape)
        grid[_window(one, match)] *= values.dtype.type(factor)
    return grid.reshape(values.shape)


def _factor(content: InitializerContent, reference: Mapping[str, LazyTensor], change: WeightScaling) -> float | Array:
    """The factor of an initializer; per row or column if it contains several tensors."""
    if content.whole:
        return change.factor_of(content.whole, reference[content.whole].shape)
    if not content.parts:
        return 1.0
    transposed = not content.covered(transposed=False)
    found = np.ones(content.shape[-1 if transposed else 0])
    done: set[int] = set()
    for part in content.parts:
        rows = [row for row in part.rows if row not in done] if part.transposed is transposed else []
        done |= set(rows)
        found[rows] = change.factor_of(part.name, reference[part.name].shape)
    return found if transposed else found.reshape(-1, *[1] * (len(content.shape) - 1))
