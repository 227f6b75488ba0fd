"""Twins: the same graphs on changed weights, so that constants show which the real weights leave in the noise.

A tiny or young model has small attention scores, so a missing softcap changes nothing that rounding would not; one with
large activations hides a wrong epsilon. Factors are powers of two, so nothing is written: the eager model scales what
it reads, and the graphs scale what they multiply by (`scaling`), from the files as they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from llmconv.checkpoint import open_weights, read_json
from llmconv.errors import InputRefused
from llmconv.files.safetensors_file import FileTensor
from llmconv.runtime.onnxruntime.guard import external_fields
from llmconv.runtime.onnxruntime.runner import SessionSettings
from llmconv.tensors import LazyTensor
from llmconv.verify.audit.weights import reference_name
from llmconv.verify.comparison.scaled_graph import scale
from llmconv.verify.reference.weight_scaling import WeightScaling


def why_not_scaled(folder: Path, reference: Path, models: Sequence[onnx.ModelProto]) -> str:
    """Why a folder can have no twin; empty when it can."""
    if "quantization_config" in read_json(reference / "config.json"):
        return "the model's own weights are quantised"
    try:
        tensors = open_weights(folder)
    except InputRefused:
        return "the graphs map no safetensors file"
    shapes = {tensor.shape for tensor in tensors.values() if len(tensor.shape) > 1}
    shapes |= {shape[::-1] for shape in shapes}
    for tensor in (tensor for model in models for tensor in model.graph.initializer):
        if tuple(tensor.dims) in shapes and not _is_mapped(tensor) and not reference_name(tensor.name, tensors):
            return f"what `{tensor.name}` holds is unknown"
    return ""


def _is_mapped(tensor: onnx.TensorProto) -> bool:
    return external_fields(tensor).get("location", "").endswith(".safetensors")


def scaled_settings(
    settings: SessionSettings, folder: Path, change: WeightScaling, *, at_weights: bool = False
) -> SessionSettings:
    """Settings with which a folder's graphs are opened as their twins; `at_weights` as for `scale`."""
    tensors = FolderTensors.of(folder)

    def apply(path: Path, model: onnx.ModelProto) -> None:
        scale(model, tensors.factors(model, change), at_weights=at_weights)

    return replace(settings, change=apply)


@dataclass(frozen=True)
class FolderTensors:
    """A folder's tensors by name, and by the bytes that they lie in.

    Attributes:
        named: by name.
        places: by file: offset and tensor, in order.
    """

    named: Mapping[str, LazyTensor]
    places: Mapping[str, Sequence[tuple[int, str, FileTensor]]]

    @classmethod
    def of(cls, folder: Path) -> FolderTensors:
        """Reads the headers of a folder's files."""
        named, places = open_weights(folder), defaultdict(list)
        for name, tensor in named.items():
            if isinstance(tensor, FileTensor):
                places[tensor.path.name].append((tensor.offset, name, tensor))
        return cls(named, {file: sorted(found, key=lambda place: place[0]) for file, found in places.items()})

    def factors(self, model: onnx.ModelProto, change: WeightScaling) -> dict[str, float]:
        """The factor of every initializer that is one of these tensors, or a part of one."""
        found = {tensor.name: self.source(tensor) for tensor in model.graph.initializer}
        return {mine: change.factor_of(name, self.named[name].shape) for mine, name in found.items() if name}

    def source(self, tensor: onnx.TensorProto) -> str:
        """The name of the tensor whose bytes an initializer maps, or whose name it has; or empty."""
        fields = external_fields(tensor)
        places = self.places.get(fields.get("location", ""), ())
        if not places:
            return reference_name(tensor.name, self.named) if not _is_mapped(tensor) else ""
        offset = int(fields.get("offset", 0))
        at = bisect_right(places, offset, key=lambda place: place[0]) - 1
        first, name, whole = places[max(at, 0)]
        return name if first <= offset < first + whole.nbytes else ""
