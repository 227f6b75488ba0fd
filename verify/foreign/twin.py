"""Twins of foreign graphs: copies whose initializers are scaled where the model's tensors in them are.

See `llmconv.verify.twin` for what they show. A graph has a twin where the audit found every matrix of the model in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from onnx import numpy_helper

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.foreign.contents import Content
from llmconv.verify.twin import SIZE_LIMITS, Change


def why_no_scaling(contents: Mapping[str, Content], reference: Mapping[str, LazyTensor], suite: str) -> str:
    """Why a graph can have no twin; empty when it can.

    A matrix of unknown content is taken for a table of the graph's own where no tensor of the model has its shape.
    """
    if sum(tensor.nbytes for tensor in reference.values()) > SIZE_LIMITS[suite]:
        return "the weights are too large for this suite"
    matrices = {name: tensor.shape for name, tensor in reference.items() if len(tensor.shape) > 1}
    found = {name for content in contents.values() if content.matched for name in content.names}
    missing = sorted(matrices.keys() - found)
    if missing:
        return f"`{missing[0]}` is not in the graph as it is"
    shapes = {*matrices.values(), *(shape[::-1] for shape in matrices.values())}
    odd = [name for name, content in contents.items() if not content.matched and content.shape in shapes]
    return f"what `{odd[0]}` holds is unknown" if odd else ""


@contextmanager
def scaled_graph(
    path: Path, contents: Mapping[str, Content], reference: Mapping[str, LazyTensor], change: Change
) -> Iterator[Path]:
    """A temporary copy of a graph with scaled weights."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        content = contents.get(tensor.name)
        if content and content.names:
            values = _scaled(numpy_helper.to_array(tensor).copy(), content, reference, change)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    with TemporaryDirectory(prefix="llmconv-twin-") as folder:
        copy = Path(folder) / path.name
        onnx.save(model, copy, save_as_external_data=True, location=f"{path.name}.data")
        yield copy


def _scaled(values: Array, content: Content, reference: Mapping[str, LazyTensor], change: Change) -> Array:
    factor = values.dtype.type(change.factor)

    def changes(name: str) -> bool:
        return len(reference[name].shape) == 2 and re.search(change.pattern, name) is not None

    if content.whole:
        return values * factor if changes(content.whole) else values
    side = not content.covered(False)
    done: set[int] = set()
    for part in content.parts:
        rows = [row for row in part.rows if row not in done] if part.side is side and changes(part.name) else []
        done |= set(rows)
        if side:
            values[:, rows] *= factor
        else:
            values[rows] *= factor
    return values
