"""Copies of graphs without the rounding of activations, which then equal the model up to rounding noise."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, graphs, load_guarded
from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.schemes import schemes

RESTORING = "DequantizeLinear"

Known = Callable[[onnx.ModelProto, Constants], Container[str] | None]


def remove_rounding(model: onnx.ModelProto, constants: Constants, known: Container[str] | None = None) -> list[str]:
    """Removes the rounding of activations in place; returns the operators that did it, each once.

    Args:
        model: the graph.
        constants: its constants.
        known: values in a fixed range that may be replaced by what they are before they are rounded; None for all.

    Raises:
        UnsupportedInput: the rounding cannot be removed.
    """
    unrounded = {name: make for scheme in schemes().values() for name, make in scheme.unrounded.items()}
    changed: dict[str, None] = {}
    made: set[str] = set()
    for graph in graphs(model.graph):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            may = node.op_type != RESTORING or known is None or node.output[0] in known
            replacement = unrounded[node.op_type](node, constants) if may and node.op_type in unrounded else None
            nodes += [node] if replacement is None else replacement
            if replacement is not None:
                changed[node.op_type] = None
                made |= set(node.output)
        del graph.node[:]
        graph.node.extend(nodes)
        kept = [value for value in graph.value_info if value.name not in made]
        del graph.value_info[:]
        graph.value_info.extend(kept)
    return list(changed)


@contextmanager
def unrounded_copy(path: Path, known: Known) -> Iterator[tuple[Path, list[str]]]:
    """Context with a copy of a graph without the rounding of activations, and the operators that round.

    If there are none, the result is the file itself, else a temporary copy with its external data.

    Args:
        path: the graph.
        known: the argument of that name of `remove_rounding`, for the graph and its constants.

    Raises:
        UnsupportedInput: the rounding cannot be removed.
    """
    model = load_guarded(path)
    constants = Constants(model, path.parent)
    changed = remove_rounding(model, constants, known(model, constants))
    if not changed:
        yield path, changed
        return
    with TemporaryDirectory(prefix="llmconv-unrounded-") as folder:
        for name in {external_fields(tensor)["location"] for tensor in external_tensors(model)}:
            shutil.copyfile(path.parent / name, Path(folder) / name)
        copy = Path(folder) / path.name
        onnx.save(model, copy)
        load_guarded(copy)
        yield copy, changed
