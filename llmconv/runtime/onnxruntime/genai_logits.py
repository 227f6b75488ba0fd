"""Which logits the graphs of a `genai_config.json` return: of all positions, or of the last one alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx


def returns_last_logits(folder: Path, model: Mapping[str, Any]) -> bool:
    """Whether a graph that takes prompts returns logits `[batch, 1, vocabulary]`, those of the last column.

    GenAI pads a batch at the end, so the last column of a shorter prompt is padding.

    Args:
        folder: of the configuration, which was checked.
        model: the section `model` of the configuration.
    """
    decoder = model.get("decoder")
    if not isinstance(decoder, Mapping):
        return False
    outputs, stages = decoder.get("outputs"), decoder.get("pipeline")
    name = outputs.get("logits", "logits") if isinstance(outputs, Mapping) else "logits"
    parts = [decoder, *(part for stage in stages or () if isinstance(stage, Mapping) for part in stage.values())]
    files = [folder / str(part["filename"]) for part in parts if isinstance(part, Mapping) and "filename" in part]
    return any(_is_last(onnx.load(file, load_external_data=False).graph, name) for file in files if file.is_file())


def _is_last(graph: onnx.GraphProto, logits: str) -> bool:
    """Whether a graph takes several tokens, and returns the logits of one."""
    lengths = [port.type.tensor_type.shape.dim[1] for port in (*graph.input[:1], *_named(graph, logits))]
    return len(lengths) == 2 and lengths[0].dim_value != 1 and lengths[1].dim_value == 1


def _named(graph: onnx.GraphProto, name: str) -> list[onnx.ValueInfoProto]:
    return [port for port in graph.output if port.name == name and len(port.type.tensor_type.shape.dim) > 1]
