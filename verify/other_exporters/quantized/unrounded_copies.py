"""Copies of graphs that round no activation: what they compute is then the model's own up to rounding noise."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, graphs, load_guarded
from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.kinds import kinds


def without_rounding(model: onnx.ModelProto, constants: Constants) -> list[str]:
    """Takes the rounding of activations off, in place; the operators that did it, each once.

    Raises:
        UnsupportedInput: it cannot be taken off.
    """
    plain = {operator: make for kind in kinds().values() for operator, make in kind.plain.items()}
    changed: dict[str, None] = {}
    made: set[str] = set()
    for graph in graphs(model.graph):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            others = plain[node.op_type](node, constants) if node.op_type in plain else None
            nodes += [node] if others is None else others
            if others is not None:
                changed[node.op_type] = None
                made |= set(node.output)
        del graph.node[:]
        graph.node.extend(nodes)
        kept = [value for value in graph.value_info if value.name not in made]
        del graph.value_info[:]
        graph.value_info.extend(kept)
    return list(changed)


@contextmanager
def plain_copy(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A graph that rounds no activation, and the operators that do in the one at `path`.

    Where none does it is the file itself, else a temporary copy with its external data beside it.

    Raises:
        UnsupportedInput: the rounding cannot be taken off.
    """
    model = load_guarded(path)
    changed = without_rounding(model, Constants(model, path.parent))
    if not changed:
        yield path, changed
        return
    with TemporaryDirectory(prefix="llmconv-plain-") as place:
        for name in {external_fields(tensor)["location"] for tensor in external_tensors(model)}:
            shutil.copyfile(path.parent / name, Path(place) / name)
        copy = Path(place) / path.name
        onnx.save(model, copy)
        load_guarded(copy)
        yield copy, changed
