"""Variants of the embedding table and the vision tower that clients chain with the decoder; the weights stay mapped."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from llmconv.runtime.images.family import IMAGE_FEATURES, PIXEL_VALUES
from llmconv.runtime.onnxruntime.shared_buffers import INPUTS_EMBEDS

INPUT_IDS = "input_ids"
FEATURE_ROWS = "num_image_tokens"
"""The symbolic axis of the features of all images, one row each."""


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


EVERY_ROW = 2**40
"""More rows than there are, times any number of features but zero."""

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
    """Renames a value where it is made and where it is used."""
    _rename_inputs(graph, old, new)
    for node in graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
