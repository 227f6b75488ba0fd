"""Joins the graphs of a staged export into one, for audits that do not run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.runtime.onnxruntime.guard import load_guarded


def load_whole(folder: Path, entry: GraphEntry) -> onnx.ModelProto:
    """The graph of an entry without its weights; stages are joined.

    Raises:
        MalformedInput: a file refers to data outside the folder.
    """
    parts = [load_guarded(path) for path in entry.paths(folder)]
    return parts[0] if len(parts) == 1 else joined_stages(parts)


def joined_stages(parts: Sequence[onnx.ModelProto]) -> onnx.ModelProto:
    """Nodes and tensors of all parts, with the inputs and outputs that are not passed between parts."""
    whole = onnx.ModelProto()
    whole.CopyFrom(parts[0])
    for part in parts[1:]:
        whole.graph.node.extend(part.graph.node)
        whole.graph.initializer.extend(part.graph.initializer)
        whole.graph.input.extend(part.graph.input)
        whole.graph.output.extend(part.graph.output)
    taken = {port.name for part in parts for port in part.graph.input}
    made = {port.name for part in parts for port in part.graph.output}
    for ports, handed_on in ((whole.graph.input, made), (whole.graph.output, taken)):
        left = {port.name: port for port in ports if port.name not in handed_on}
        del ports[:]
        ports.extend(left.values())
    return whole
