"""Mutants of weights and wiring: the wrong tensor, a changed tensor, a lost bias or branch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from llmconv.files.safetensors_file import read_header
from llmconv.tensors import Array
from tests.builders.mutants.surgery import (
    attribute,
    initializer,
    layer_of,
    make_inline,
    replace_input,
    users,
    weight_names,
)

Surgery = Callable[[onnx.ModelProto, Path], bool]


ATTENTION_OUT = r"(layers|h)\.{}\.(self_attn\.o_proj|attn\.c_proj|self_attention\.dense)\.weight$"


def layers_swapped(model: onnx.ModelProto, folder: Path) -> bool:
    """Two layers' attention outputs use each other's weight."""
    names = [weight_names(model, ATTENTION_OUT.format(layer))[0] for layer in (1, 2)]
    first, second = (initializer(model, name) for name in names)
    assert first is not None and second is not None
    for mine, other in zip(first.external_data, second.external_data, strict=True):
        mine.value, other.value = other.value, mine.value
    return True


def transposed_weight(model: onnx.ModelProto, folder: Path) -> bool:
    """One square weight is used transposed."""
    name = weight_names(model, ATTENTION_OUT.format(1))[0]
    for node in model.graph.node:
        if name in node.input and node.op_type == "Gemm":
            flag = attribute(node, "transB")
            value = flag.i if flag is not None else 0
            if flag is not None:
                node.attribute.remove(flag)
            node.attribute.append(helper.make_attribute("transB", 1 - value))
            return True
    return False


def bias_dropped(model: onnx.ModelProto, folder: Path) -> bool:
    """One bias is not added."""
    for node in model.graph.node:
        names = [name for name in node.input if name.endswith(".bias")]
        if layer_of(node) != 1 or not names or node.op_type == "LayerNormalization":
            continue
        if node.op_type == "Gemm":
            del node.input[2:]
        else:
            node.input[:] = [name for name in node.input if name not in names]
            node.op_type = "Identity"
        return True
    return False


def _residual(model: onnx.ModelProto) -> onnx.NodeProto | None:
    """The first residual addition of layer 2: the sum of two computed values, in the layer's own scope."""
    found = [n for n in users(model, "Add") if re.search(r"(layers|h)\.2(\.\w+)?/Add$", n.name)]
    inits = {tensor.name for tensor in model.graph.initializer}
    return next((node for node in found if not inits & set(node.input) and "norm" not in node.name), None)


def residual_branch_dropped(index: int) -> Surgery:
    """One side of a residual addition is lost."""

    def apply(model: onnx.ModelProto, folder: Path) -> bool:
        node = _residual(model)
        if node is None:
            return False
        kept = node.input[index]
        node.op_type = "Identity"
        node.input[:] = [kept]
        return True

    return apply


def stale_weight(model: onnx.ModelProto, folder: Path) -> bool:
    """One small weight is a copy from before the last update."""
    name = weight_names(model, r"(layers|h)\.1\..*(norm|ln_1).*weight$")[0]
    return make_inline(model, name, folder, lambda values: values * np.float32(1.0005))


def lora_scale(model: onnx.ModelProto, folder: Path) -> bool:
    """A rank-one update of 5 % of the weight was merged with a scale 1 % too large."""

    def change(values: Array) -> Array:
        rng = np.random.default_rng(0)
        update = np.outer(rng.standard_normal(values.shape[0]), rng.standard_normal(values.shape[1]))
        update *= 0.05 * np.linalg.norm(values) / np.linalg.norm(update)
        return values + 0.01 * update

    return make_inline(model, weight_names(model, ATTENTION_OUT.format(1))[0], folder, change)


def bfloat16_weight(model: onnx.ModelProto, folder: Path) -> bool:
    """One weight was stored in bfloat16 on the way."""

    def change(values: Array) -> Array:
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    return make_inline(model, weight_names(model, ATTENTION_OUT.format(1))[0], folder, change)


def head_is_embedding(model: onnx.ModelProto, folder: Path) -> bool:
    """The head uses the embedding although the two are not tied."""
    heads = weight_names(model, r"^lm_head\.weight$")
    tables = weight_names(model, r"embed_tokens\.weight$")
    if not heads or not tables:
        return False
    for node in model.graph.node:
        replace_input(node, heads[0], tables[0])
    return True


def flip_bit(bit: int, layer: int = 1) -> Surgery:
    """Flips one bit of one weight in the folder's file, not in the graph."""

    def apply(model: onnx.ModelProto, folder: Path) -> bool:
        name = weight_names(model, ATTENTION_OUT.format(layer))[0]
        tensor = read_header(folder / "model.safetensors").tensors[name]
        with open(folder / "model.safetensors", "r+b") as file:
            file.seek(tensor.offset + 40 + bit // 8)
            (value,) = file.read(1)
            file.seek(tensor.offset + 40 + bit // 8)
            file.write(bytes([value ^ (1 << bit % 8)]))
        return True

    return apply
