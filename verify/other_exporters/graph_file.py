"""GraphFile: one graph of another exporter as read from its file, with what is known before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from llmconv.errors import LlmconvError, OutOfMemory, UsageProblem
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.runner import SessionSettings
from llmconv.verify.other_exporters.content_matching import Content
from llmconv.verify.other_exporters.maps import find_port_maps
from llmconv.verify.other_exporters.port_map import Binding, bind
from llmconv.verify.other_exporters.quantized.kinds import quantized_operators
from llmconv.verify.other_exporters.quantized.tensor_matching import Found
from llmconv.verify.other_exporters.session import ForeignGraph, Model
from llmconv.verify.results.report import Check

MOST = 2
"""One graph, or that of the prompt and that of the steps."""

PRECISIONS = {
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
}


@dataclass
class GraphFile:
    """A file, guarded and bound.

    Attributes:
        path: of the file.
        name: in reports: the file's, with its folder's where two have the same.
        model: without its weights.
        binding: its ports.
        contents: its initializers, once they were audited.
        emulated: it is a copy that rounds after every node.
        found: its quantised matrices, likewise.
        unread: why those cannot be read; empty when they can.
    """

    path: Path
    name: str
    model: onnx.ModelProto
    binding: Binding
    contents: Mapping[str, Content] = field(default_factory=dict)
    emulated: bool = False
    found: list[Found] = field(default_factory=list)
    unread: str = ""

    @property
    def dtype(self) -> str:
        """Of the logits or of the cache, whichever is the narrower, as the file says."""
        names = {self.binding.port_map.logits, *self.binding.present.values()}
        kinds = {port.type.tensor_type.elem_type for port in self.model.graph.output if port.name in names}
        return next((name for kind, name in PRECISIONS.items() if kind in kinds), "float32")

    @property
    def quantized(self) -> bool:
        """Whether some operator has quantised weights."""
        return bool(quantized_operators(self.model))

    def open(self, eager: Model, settings: SessionSettings) -> ForeignGraph | Check:
        """The graph in a session, or the failed check where onnxruntime refuses it."""
        settings = replace(settings, reuse=not self.emulated)
        try:
            return ForeignGraph(self.path, self.model, self.binding, eager, settings, self.name)
        except OutOfMemory:
            raise
        except LlmconvError as error:
            return Check("structure", self.name, "", verdict="fail", detail=error.message)


def read_graphs(paths: Sequence[str | Path], input_map: str) -> list[GraphFile]:
    """The files, once all that they refer to is harmless and their ports are known.

    Raises:
        UsageProblem: none or too many, or an unknown map.
        InputRefused: a graph fits no map, or refers to what it must not.
    """
    files = [Path(path) for path in paths]
    if not 0 < len(files) <= MOST:
        raise UsageProblem(f"{len(files)} graphs were given", hint="give one, or that of the prompt and of the steps")
    rows = find_port_maps(input_map)
    alone = len({path.name for path in files}) == len(files)
    models = [load_guarded(path) for path in files]
    return [
        GraphFile(path, path.name if alone else f"{path.parent.name}/{path.name}", model, bind(model, path.name, rows))
        for path, model in zip(files, models, strict=True)
    ]
