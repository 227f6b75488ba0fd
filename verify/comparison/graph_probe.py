"""GraphProbe: reads inner values of a graph, by running it with more outputs, or a piece of it, from memory.

onnxruntime gets the changed graph as bytes and the folder of the weights as an option, so that it maps the same weight
files. Graph optimization is off, because it would remove the values to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from llmconv.errors import MalformedInput, first_line
from llmconv.runtime.onnxruntime.guard import weight_bytes
from llmconv.runtime.onnxruntime.prepacked import WEIGHTS_FOLDER, followed
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.time_limit import LimitedSession, TimeLimit
from llmconv.tensors import Array

AT_ONCE = 64
"""Values that are read in one run."""


@dataclass(frozen=True)
class GraphProbe:
    """A graph whose inner values can be read without optimization; the guard has checked its files in `folder`."""

    model: onnx.ModelProto
    folder: Path
    settings: SessionSettings

    def read(self, feeds: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """The values of these names, except those that are not tensors; MalformedInput if the graph cannot run."""
        found: dict[str, Array] = {}
        names = [name for name in names if name]  # a node may omit an output
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            found |= _run(self._with_outputs(some), self.folder, self.settings, feeds)
        return {name: found[name] for name in names if name in found}

    def _with_outputs(self, names: Sequence[str]) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        del model.graph.output[:]
        declared = {port.name: port for port in self.model.graph.output}
        model.graph.output.extend(declared.get(name) or onnx.ValueInfoProto(name=name) for name in names)
        return _pruned(model)

    def piece(self, nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, Array], output: str) -> onnx.ModelProto:
        """A graph of these sorted nodes and one output; `feeds` become inputs, other values stay constants."""
        made = {name for node in nodes for name in node.output}
        read = {name for node in nodes for name in inner_inputs(node) if name} - made
        piece = onnx.ModelProto(
            ir_version=self.model.ir_version,
            opset_import=self.model.opset_import,
            functions=self.model.functions,
            producer_name=self.model.producer_name,
        )
        piece.graph.name = "piece"
        piece.graph.node.extend(nodes)
        piece.graph.initializer.extend(tensor for tensor in self.model.graph.initializer if tensor.name in read)
        piece.graph.input.extend(port_of(name, array) for name, array in feeds.items() if name in read)
        piece.graph.output.append(onnx.ValueInfoProto(name=output))
        return piece

    def run_piece(self, nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, Array], output: str) -> Array | None:
        """The output of `piece`; None if it cannot be run. Arguments as in `piece`."""
        try:
            found = _run(self.piece(nodes, feeds, output), self.folder, self.settings, feeds)
        except MalformedInput:
            return None
        return found.get(output)


def _run(
    model: onnx.ModelProto, folder: Path, settings: SessionSettings, feeds: Mapping[str, Array]
) -> dict[str, Array]:
    options = replace(settings, optimization="disable").options()
    model, folder = followed(model, folder.resolve())
    options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    try:
        limit = TimeLimit(weight_bytes(model), settings.timeout)
        session = LimitedSession(model.SerializeToString(), options, ["CPUExecutionProvider"], limit)
        names = [port.name for port in session.get_outputs()]
        taken = {port.name: np.ascontiguousarray(feeds[port.name]) for port in session.get_inputs()}
        arrays = session.run(names, taken)
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise MalformedInput(
            f"onnxruntime cannot run the graph with additional outputs: {first_line(error)}",
            hint="run without `--bisect`",
        ) from error
    return {name: array for name, array in zip(names, arrays, strict=True) if isinstance(array, np.ndarray)}


def _pruned(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with the nodes that its outputs need."""
    needed = {port.name for port in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(inner_inputs(node))
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(kept)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for ports in (model.graph.initializer, model.graph.input):
        left = [port for port in ports if port.name in needed]
        del ports[:]
        ports.extend(left)
    return model


def inner_inputs(node: onnx.NodeProto) -> Iterable[str]:
    """Names of the values that a node reads, including those that its subgraphs read."""
    yield from node.input
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            for inner in graph.node:
                yield from inner_inputs(inner)


def port_of(name: str, array: Array) -> onnx.ValueInfoProto:
    """The declaration of an input for this array."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(name, kind, list(array.shape))
