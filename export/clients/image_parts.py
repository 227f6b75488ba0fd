"""Variants of the embedding table and the vision tower that clients chain with the decoder; the weights stay mapped."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from llmconv.runtime.onnxruntime.embeddings import INPUTS_EMBEDS
from llmconv.runtime.onnxruntime.vision import IMAGE_FEATURES, PIXEL_VALUES

INPUT_IDS = "input_ids"
FEATURE_ROWS = "num_image_tokens"
"""The symbolic axis of the features of all images, one row each."""


def take_float32_pixels(model: onnx.ModelProto) -> None:
    """Casts `pixel_values` in the graph: processors of clients return float32 for a tower of any precision.

    Args:
        model: a vision tower; it is changed.
    """
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
    """Returns `image_features` as rows `[num_image_tokens, hidden]` of all images.

    Args:
        model: a vision tower, whose features are `[num_images, tokens, hidden]`; it is changed.
    """
    graph = model.graph
    port = next(port for port in graph.output if port.name == IMAGE_FEATURES)
    precision, hidden = port.type.tensor_type.elem_type, port.type.tensor_type.shape.dim[2].dim_value
    whole, shape = f"{IMAGE_FEATURES}/Reshape:in", f"{IMAGE_FEATURES}/Reshape:shape"
    _rename_output(graph, IMAGE_FEATURES, whole)
    graph.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [2], [-1, hidden]))
    graph.node.append(helper.make_node("Reshape", [whole, shape], [IMAGE_FEATURES], name=f"{IMAGE_FEATURES}/Reshape"))
    port.CopyFrom(helper.make_tensor_value_info(IMAGE_FEATURES, precision, [FEATURE_ROWS, hidden]))


def place_features(model: onnx.ModelProto, token: int) -> None:
    """Adds the input `image_features` `[num_image_tokens, hidden]`, whose rows replace those of the placeholder.

    Args:
        model: the graph of an embedding table, `input_ids` to `inputs_embeds`; it is changed.
        token: the placeholder token; the graph fails if a call has not one row for each.
    """
    graph = model.graph
    port = next(port for port in graph.output if port.name == INPUTS_EMBEDS)
    precision, hidden = port.type.tensor_type.elem_type, port.type.tensor_type.shape.dim[2].dim_value
    table, placeholder = f"{INPUTS_EMBEDS}/ScatterND:in", f"{INPUT_IDS}/Equal:token"
    names = [f"{INPUT_IDS}/{operator}" for operator in ("Equal", "NonZero", "Transpose")]
    equal, found, rows = (f"{name}:0" for name in names)
    _rename_output(graph, INPUTS_EMBEDS, table)
    graph.initializer.append(helper.make_tensor(placeholder, TensorProto.INT64, [], [token]))
    graph.input.append(helper.make_tensor_value_info(IMAGE_FEATURES, precision, [FEATURE_ROWS, hidden]))
    graph.node.extend(
        [
            helper.make_node("Equal", [INPUT_IDS, placeholder], [equal], name=names[0]),
            helper.make_node("NonZero", [equal], [found], name=names[1]),
            helper.make_node("Transpose", [found], [rows], name=names[2], perm=[1, 0]),
            helper.make_node(
                "ScatterND", [table, rows, IMAGE_FEATURES], [INPUTS_EMBEDS], name=f"{INPUTS_EMBEDS}/ScatterND"
            ),
        ]
    )


def _rename_inputs(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def _rename_output(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Renames a value where it is made and where it is used."""
    _rename_inputs(graph, old, new)
    for node in graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
