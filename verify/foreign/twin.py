"""Twins of foreign graphs: copies whose initializers are scaled where the model's tensors in them are.

See `llmconv.verify.twin` for what they show. A graph has a twin where the audit found every matrix of the model in it;
of quantised ones the scales are scaled.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.foreign.contents import Content
from llmconv.verify.foreign.quantized.matching import Found, Placement
from llmconv.verify.twin import CHANGES, SIZE_LIMITS, Change


def why_no_scaling(
    contents: Mapping[str, Content], quantized: Sequence[Found], reference: Mapping[str, LazyTensor], suite: str
) -> str:
    """Why a graph can have no twin; empty when it can.

    A matrix of unknown content is taken for a table of the graph's own where no tensor of the model has its shape.
    """
    if sum(tensor.nbytes for tensor in reference.values()) > SIZE_LIMITS[suite]:
        return "the weights are too large for this suite"
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
        if any(not _is_exact(one.stored.scale, change.factor) for change in CHANGES):
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


@contextmanager
def scaled_graph(
    path: Path,
    contents: Mapping[str, Content],
    quantized: Sequence[Found],
    reference: Mapping[str, LazyTensor],
    change: Change,
) -> Iterator[Path]:
    """A temporary copy of a graph with scaled weights."""
    model = onnx.load(path)
    scales = {one.stored.scales: one for one in quantized}
    for tensor in model.graph.initializer:
        content = contents.get(tensor.name)
        if tensor.name in scales:
            values = _scaled_grid(numpy_helper.to_array(tensor).copy(), scales[tensor.name], reference, change)
        elif content and content.names:
            values = _scaled(numpy_helper.to_array(tensor).copy(), content, reference, change)
        else:
            continue
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    with TemporaryDirectory(prefix="llmconv-twin-") as folder:
        copy = Path(folder) / path.name
        onnx.save(model, copy, save_as_external_data=True, location=f"{path.name}.data")
        yield copy


def _changes(name: str, reference: Mapping[str, LazyTensor], change: Change) -> bool:
    return len(reference[name].shape) == 2 and re.search(change.pattern, name) is not None


def _scaled_grid(values: Array, one: Found, reference: Mapping[str, LazyTensor], change: Change) -> Array:
    """The scales of a quantised matrix, of whichever tensors in it change."""
    grid = values.reshape(one.stored.scale.shape)
    for placement in one.placements:
        if _changes(placement.name, reference, change):
            grid[_window(one, placement)] *= values.dtype.type(change.factor)
    return grid.reshape(values.shape)


def _scaled(values: Array, content: Content, reference: Mapping[str, LazyTensor], change: Change) -> Array:
    factor = values.dtype.type(change.factor)
    if content.whole:
        return values * factor if _changes(content.whole, reference, change) else values
    side = not content.covered(False)
    done: set[int] = set()
    for part in content.parts:
        wanted = part.side is side and _changes(part.name, reference, change)
        rows = [row for row in part.rows if row not in done] if wanted else []
        done |= set(rows)
        if side:
            values[:, rows] *= factor
        else:
            values[rows] *= factor
    return values
