"""The graphs of a folder as files whose weights are audited; stages are one graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx

from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.scaled_weights import Scaler
from llmconv.verify.other_exporters.graph_file import GraphFile
from llmconv.verify.other_exporters.maps.llmconv import MAP
from llmconv.verify.other_exporters.port_map import Binding, input_names
from llmconv.verify.other_exporters.replay import ExternalGraphs
from llmconv.verify.other_exporters.scaled_weights import scaled_settings, why_not_scalable
from llmconv.verify.reference.weight_scaling import WeightScaling


def audited_files(verified: VerifiedFolder) -> list[GraphFile]:
    """A file for each graph of the folder, and one for its embedding table; `path` is that of the first stage."""
    entries = {entry.name: entry for entry in verified.entries}
    firsts = {name: entries[name].files[0] if name in entries else name for name in verified.models}
    return [_file(verified.path / firsts[name], name, model) for name, model in verified.models.items()]


def _file(path: Path, name: str, model: onnx.ModelProto) -> GraphFile:
    """The binding is incomplete: entries run as `OrtGraph`, which needs none."""
    past = {MAP.cache_name(MAP.past, port): port for port in input_names(model)}
    present = {MAP.cache_name(MAP.present, port.name): port.name for port in model.graph.output}
    past.pop("", None)
    present.pop("", None)
    others = frozenset(input_names(model)) - set(past.values())
    return GraphFile(path, name, model, Binding(MAP, others, past, present))


def scaler_of(verified: VerifiedFolder, graphs: ExternalGraphs) -> Scaler:
    """Opens graphs on scaled weights: scales of codes, and weights of floats.

    Args:
        verified: the folder.
        graphs: its audited files, and the tensors of the model.
    """
    found = {file.name: file for file in graphs.files}
    stages = {name: found[entry.name] for entry in verified.entries for name in entry.files}
    decoders = [found[entry.name] for entry in verified.entries]
    reasons = [why_not_scalable(file.contents, file.quantized_weights, graphs.tensors) for file in decoders]

    def scaled(settings: SessionSettings, scaling: WeightScaling) -> SessionSettings:
        def change(path: Path, model: onnx.ModelProto) -> None:
            if settings.change:
                settings.change(path, model)
            file = stages.get(path.name) or found[path.name]
            scale = scaled_settings(settings, file, graphs.tensors, scaling).change
            assert scale
            scale(path, model)

        return replace(settings, change=change)

    return Scaler(next(filter(None, reasons), ""), scaled)
