"""Weights that are links, as in the Hub cache: onnxruntime does not follow them if it gets the graph from memory."""

from __future__ import annotations

from pathlib import Path

import onnx

from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors


def followed(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, Path]:
    """A graph and the folder of its weights, after following links that all lead into one folder.

    Args:
        model: without the weights; it is not changed.
        folder: of its file, whose links the guard has checked.
    """
    names = {external_fields(tensor)["location"] for tensor in external_tensors(model)}
    targets = {name: (folder / name).resolve() for name in names if (folder / name).is_symlink()}
    homes = {target.parent for target in targets.values()}
    if len(targets) < len(names) or len(homes) != 1:
        return model, folder
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in external_tensors(copy):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = targets[entry.value].name
    return copy, homes.pop()
