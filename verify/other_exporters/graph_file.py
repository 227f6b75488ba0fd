"""GraphFile: one graph of another exporter as read from its file, before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from llmconv.errors import LlmconvError, OutOfMemory, UsageProblem
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify.other_exporters.content_matching import InitializerContent
from llmconv.verify.other_exporters.external_graph import ExternalGraph, ModelSizes
from llmconv.verify.other_exporters.maps import find_port_maps
from llmconv.verify.other_exporters.port_map import Binding, bind
from llmconv.verify.other_exporters.quantized.schemes import quantized_operators
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix
from llmconv.verify.results.report import Check

MAX_GRAPHS = 2
"""One graph, or a prefill and a decode graph."""

PRECISIONS = {
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
}


@dataclass
class GraphFile:
    """A checked graph file and its inputs and outputs.

    Attributes:
        name: name in reports: the file name, with the folder's name if two files have the same name.
        contents: its initializers by name, after their audit.
        emulates: the file of which `path` is a copy that rounds after every node; else None.
        quantized_weights: its quantized matrices, after their audit.
        unreadable: why the quantized matrices cannot be read; else empty.
    """

    path: Path
    name: str
    model: onnx.ModelProto
    binding: Binding
    contents: Mapping[str, InitializerContent] = field(default_factory=dict)
    emulates: Path | None = None
    quantized_weights: list[MatchedMatrix] = field(default_factory=list)
    unreadable: str = ""

    @property
    def dtype(self) -> str:
        """The narrower of the declared dtypes of logits and cache."""
        names = {self.binding.port_map.logits, *self.binding.present.values()}
        kinds = {port.type.tensor_type.elem_type for port in self.model.graph.output if port.name in names}
        return next((name for kind, name in PRECISIONS.items() if kind in kinds), "float32")

    @property
    def quantized(self) -> bool:
        """Whether any operator has quantized weights."""
        return bool(quantized_operators(self.model))

    def open(self, sizes: ModelSizes, settings: SessionSettings) -> ExternalGraph | Check:
        """The opened graph, or a failed check if onnxruntime refuses it."""
        settings = replace(settings, reuse=self.emulates is None)
        try:
            return ExternalGraph(self.path, self.model, self.binding, sizes, settings, self.name)
        except OutOfMemory:
            raise
        except LlmconvError as error:
            return Check("structure", self.name, "", verdict="fail", detail=error.message)


def read_graphs(paths: Sequence[str | Path], input_map: str) -> list[GraphFile]:
    """The one or two checked graph files; `input_map` is the name of an input map, `auto`, or a JSON file.

    Raises:
        UsageProblem: no file or too many, or an unknown map.
        InputRefused: a graph fits no map, or the guard refuses it.
    """
    files = [Path(path) for path in paths]
    if not 0 < len(files) <= MAX_GRAPHS:
        raise UsageProblem(f"{len(files)} graphs were given", hint="give one graph, or a prefill and a decode graph")
    rows = find_port_maps(input_map)
    is_unique = len({path.name for path in files}) == len(files)
    models = [load_guarded(path) for path in files]
    return [
        GraphFile(
            path, path.name if is_unique else f"{path.parent.name}/{path.name}", model, bind(model, path.name, rows)
        )
        for path, model in zip(files, models, strict=True)
    ]
