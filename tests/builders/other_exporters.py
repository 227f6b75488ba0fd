"""Graphs by transformers' own exporter, and small changes that make them graphs of other conventions."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import torch
from transformers import AutoModelForCausalLM
from transformers.exporters import OnnxConfig, OnnxExporter

FILES = ("prefill.onnx", "decode.onnx")


def export_by_transformers(model: Path, folder: Path, dtype: str = "float32") -> list[Path]:
    """Prompt and step of a padded batch: with one full sequence the exporter leaves batch and mask out."""
    eager = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    ids = torch.arange(3, 23).reshape(2, 10)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        OnnxExporter().export_for_generation(eager, inputs, OnnxConfig(dynamic=True)).save_pretrained(folder)
    return [folder / name for name in FILES]


def changed(path: Path, target: Path, change: Callable[[onnx.ModelProto], object]) -> Path:
    """A copy of a graph with its weights inside, changed."""
    model = onnx.load(path)
    change(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, target)
    return target


def renamed(pattern: str, name: str) -> Callable[[onnx.ModelProto], None]:
    """Renames the inputs and outputs that match, wherever they occur."""

    def change(model: onnx.ModelProto) -> None:
        def new(old: str) -> str:
            return re.sub(pattern, name, old) if old in ports else old

        ports = {port.name for port in [*model.graph.input, *model.graph.output]}
        for node in model.graph.node:
            node.input[:] = [new(value) for value in node.input]
            node.output[:] = [new(value) for value in node.output]
        for port in [*model.graph.input, *model.graph.output]:
            port.name = new(port.name)

    return change


def transposed_cache(model: onnx.ModelProto) -> None:
    """Keys and values with tokens before heads."""
    for ports, inward in ((model.graph.input, True), (model.graph.output, False)):
        for port in ports:
            if port.name.startswith(("past_key_values", "present")):
                _transpose(model, port, inward)


def _transpose(model: onnx.ModelProto, port: onnx.ValueInfoProto, inward: bool) -> None:
    inner = f"{port.name}_inner"
    for node in model.graph.node:
        side = node.input if inward else node.output
        side[:] = [inner if value == port.name else value for value in side]
        if not inward:
            node.input[:] = [inner if value == port.name else value for value in node.input]
    ends = (port.name, inner) if inward else (inner, port.name)
    node = onnx.helper.make_node("Transpose", [ends[0]], [ends[1]], perm=[0, 2, 1, 3])
    model.graph.node.insert(0 if inward else len(model.graph.node), node)
    axes = port.type.tensor_type.shape.dim
    moved = [onnx.TensorShapeProto.Dimension.FromString(axes[at].SerializeToString()) for at in (0, 2, 1, 3)]
    del axes[:]
    axes.extend(moved)
