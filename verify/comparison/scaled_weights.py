"""Opens the graphs of a folder on scaled weights, so that constants matter that the real weights hide in the noise.

A small or untrained model has small attention scores, so that a missing softcap changes no more than rounding; large
activations hide a wrong epsilon. Factors are powers of two, so no file is written: the eager model scales the weights
that it reads, and the graphs are rewritten in memory (`scaled_graph`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from llmconv.checkpoint import open_weights, read_json
from llmconv.errors import InputRefused
from llmconv.files.safetensors_file import FileTensor
from llmconv.runtime.onnxruntime.guard import external_fields
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.tensors import LazyTensor
from llmconv.verify.audit.weights import reference_name
from llmconv.verify.comparison.scaled_graph import scale
from llmconv.verify.reference.weight_scaling import WeightScaling


@dataclass(frozen=True)
class Scaler:
    """Opens the graphs of a folder on scaled weights.

    Attributes:
        why_not: why they cannot be scaled; empty if they can.
        scaled: settings that scale the weights, of the settings without and a scaling.
    """

    why_not: str
    scaled: Callable[[SessionSettings, WeightScaling], SessionSettings]

    @classmethod
    def of(cls, folder: Path, reference: Path, models: Sequence[onnx.ModelProto]) -> Scaler:
        """For weights that the files of the folder contain; arguments as in `why_not_scaled`."""
        reason = why_not_scaled(folder, reference, models)
        return cls(reason, lambda settings, scaling: scaled_settings(settings, folder, scaling))


def why_not_scaled(folder: Path, reference: Path, models: Sequence[onnx.ModelProto]) -> str:
    """Why the graphs of a folder cannot run on scaled weights; empty if they can.

    Args:
        folder: the folder of the graphs.
        reference: the model's folder.
        models: the graphs without their weights.
    """
    if "quantization_config" in read_json(reference / "config.json"):
        return "the model's own weights are quantized"
    try:
        tensors = open_weights(folder)
    except InputRefused:
        return "the graphs map no safetensors file"
    shapes = {tensor.shape for tensor in tensors.values() if len(tensor.shape) > 1}
    shapes |= {shape[::-1] for shape in shapes}
    for tensor in (tensor for model in models for tensor in model.graph.initializer):
        if tuple(tensor.dims) in shapes and not _is_mapped(tensor) and not reference_name(tensor.name, tensors):
            return f"unknown weight `{tensor.name}`"
    return ""


def _is_mapped(tensor: onnx.TensorProto) -> bool:
    return external_fields(tensor).get("location", "").endswith(".safetensors")


def scaled_settings(
    settings: SessionSettings, folder: Path, scaling: WeightScaling, *, at_weights: bool = False
) -> SessionSettings:
    """Settings that open the graphs of a folder on scaled weights.

    Args:
        settings: of onnxruntime.
        folder: the folder of the graphs.
        scaling: which weights, and the factor.
        at_weights: as for `scale`.
    """
    tensors = FolderTensors.of(folder)

    def apply(path: Path, model: onnx.ModelProto) -> None:
        if settings.change:
            settings.change(path, model)
        scale(model, tensors.factors(model, scaling), at_weights=at_weights)

    return replace(settings, change=apply)


@dataclass(frozen=True)
class FolderTensors:
    """The tensors of a folder by name and by position in the files.

    Attributes:
        named: tensors by name.
        places: by file name: offset, name and tensor, ordered by offset.
    """

    named: Mapping[str, LazyTensor]
    places: Mapping[str, Sequence[tuple[int, str, FileTensor]]]

    @classmethod
    def of(cls, folder: Path) -> FolderTensors:
        """Reads the headers of the files in a folder."""
        named, places = open_weights(folder), defaultdict(list)
        for name, tensor in named.items():
            if isinstance(tensor, FileTensor):
                places[tensor.path.name].append((tensor.offset, name, tensor))
        return cls(named, {file: sorted(found, key=lambda place: place[0]) for file, found in places.items()})

    def factors(self, model: onnx.ModelProto, scaling: WeightScaling) -> dict[str, float]:
        """The factor of every initializer that is one of these tensors or a part of one."""
        found = {tensor.name: self.source(tensor) for tensor in model.graph.initializer}
        return {mine: scaling.factor_of(name, self.named[name].shape) for mine, name in found.items() if name}

    def source(self, tensor: onnx.TensorProto) -> str:
        """Name of the tensor that an initializer maps or is named after; empty if there is none."""
        fields = external_fields(tensor)
        places = self.places.get(fields.get("location", ""), ())
        if not places:
            return reference_name(tensor.name, self.named) if not _is_mapped(tensor) else ""
        offset = int(fields.get("offset", 0))
        at = bisect_right(places, offset, key=lambda place: place[0]) - 1
        first, name, whole = places[max(at, 0)]
        return name if first <= offset < first + whole.nbytes else ""
