"""ImageModel: what clients read of a model that takes images, besides its decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
from onnx import TensorProto, helper

from llmconv.checkpoint import Checkpoint
from llmconv.output.plan import json_bytes
from llmconv.runtime.extra_inputs import IMAGE_FEATURES, INPUTS_EMBEDS, PIXEL_VALUES

CONFIG, PROCESSOR, PREPROCESSOR = "config.json", "processor_config.json", "preprocessor_config.json"

Edits = Mapping[str, Mapping[str, Any]]  # fields that a client needs in JSON files of the model, by file name


@dataclass(frozen=True)
class ImageModel:
    """A multimodal model whose vision tower is a graph: its transformers config and the content of its JSON files."""

    config: Any
    fields: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)  # empty if `processor_config.json` is missing
    has_preprocessor: bool = True

    @classmethod
    def of(cls, config: Any, checkpoint: Checkpoint) -> ImageModel:
        """The model of a checkpoint with `config.json` and the processor's files."""
        files = checkpoint.side_files
        return cls(config, checkpoint.config, _content(files.get(PROCESSOR)), PREPROCESSOR in files)

    @property
    def model_type(self) -> str:
        return str(self.config.model_type)

    @property
    def token(self) -> int:
        return int(self.config.image_token_id)


def edited(checkpoint: Checkpoint, edits: Edits) -> Checkpoint:
    """The checkpoint with other fields in its JSON files; edits of files that it lacks are left out."""
    side_files = {
        name: json_bytes({**_content(content), **edits[name]}) if name in edits else content
        for name, content in checkpoint.side_files.items()
    }
    return replace(checkpoint, config={**checkpoint.config, **edits.get(CONFIG, {})}, side_files=side_files)


def _content(text: bytes | None) -> dict[str, Any]:
    """The object in a JSON file; empty for another file."""
    try:
        found = json.loads(text or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


INPUT_IDS = "input_ids"
FEATURE_ROWS = "num_image_tokens"  # the symbolic axis of the features of all images, one row each


def take_float32_pixels(model: onnx.ModelProto) -> None:
    """Casts `pixel_values` in the graph, in place: processors of clients return float32 for a tower of any dtype."""
    graph = model.graph
    port = next(port for port in graph.input if port.name == PIXEL_VALUES)
    precision = port.type.tensor_type.elem_type
    if precision == TensorProto.FLOAT:
        return
    cast = f"{PIXEL_VALUES}/Cast:0"
    _rename_inputs(graph, PIXEL_VALUES, cast)
    port.type.tensor_type.elem_type = TensorProto.FLOAT
    graph.node.insert(0, helper.make_node("Cast", [PIXEL_VALUES], [cast], name=f"{PIXEL_VALUES}/Cast", to=precision))


def flatten_features(model: onnx.ModelProto) -> None:
    """Reshapes `image_features` from `[num_images, tokens, hidden]` to `[num_image_tokens, hidden]`, in place."""
    graph = model.graph
    port = next(port for port in graph.output if port.name == IMAGE_FEATURES)
    precision, hidden = port.type.tensor_type.elem_type, port.type.tensor_type.shape.dim[2].dim_value
    whole, shape = f"{IMAGE_FEATURES}/Reshape:in", f"{IMAGE_FEATURES}/Reshape:shape"
    _rename_output(graph, IMAGE_FEATURES, whole)
    graph.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [2], [-1, hidden]))
    graph.node.append(helper.make_node("Reshape", [whole, shape], [IMAGE_FEATURES], name=f"{IMAGE_FEATURES}/Reshape"))
    port.CopyFrom(helper.make_tensor_value_info(IMAGE_FEATURES, precision, [FEATURE_ROWS, hidden]))


def place_features(model: onnx.ModelProto, token: int) -> None:
    """Adds the input `image_features` `[num_image_tokens, hidden]` to the graph of an embedding table, in place.

    Its rows replace those of the placeholder `token`. Without features the placeholder is a token like others, as in
    transformers; a model may also generate it. Otherwise the graph fails if there is not one row for each.
    """
    graph = model.graph
    port = next(port for port in graph.output if port.name == INPUTS_EMBEDS)
    precision, hidden = port.type.tensor_type.elem_type, port.type.tensor_type.shape.dim[2].dim_value
    _rename_output(graph, INPUTS_EMBEDS, "embedded_tokens")
    graph.input.append(helper.make_tensor_value_info(IMAGE_FEATURES, precision, [FEATURE_ROWS, hidden]))
    for name, dims, value in (("placeholder", [], token), ("first", [1], 0), ("every_row", [1], EVERY_ROW)):
        graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, dims, [value]))
    for operator, inputs, output, attributes in PLACING:
        graph.node.append(helper.make_node(operator, inputs, [output], name=f"place/{operator}", **attributes))


EVERY_ROW = 2**40  # more rows than there are, times any number of features but zero

PLACING: tuple[tuple[str, list[str], str, dict[str, Any]], ...] = (
    ("Equal", [INPUT_IDS, "placeholder"], "is_placeholder", {}),
    ("NonZero", ["is_placeholder"], "places_by_axis", {}),
    ("Transpose", ["places_by_axis"], "places", {"perm": [1, 0]}),
    ("Shape", [IMAGE_FEATURES], "feature_count", {"start": 0, "end": 1}),
    ("Mul", ["feature_count", "every_row"], "end", {}),
    ("Slice", ["places", "first", "end", "first"], "filled_places", {}),
    ("ScatterND", ["embedded_tokens", "filled_places", IMAGE_FEATURES], INPUTS_EMBEDS, {}),
)
"""Operator, inputs, output and attributes of the nodes that `place_features` adds."""


def _rename_inputs(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def _rename_output(graph: onnx.GraphProto, old: str, new: str) -> None:
    _rename_inputs(graph, old, new)
    for node in graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
