"""Mutants of the wiring: what is computed from the wrong value, or in the wrong precision."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.builders.mutants.surgery import (
    add_constant,
    attribute,
    constant_value,
    constants,
    initializer,
    insert,
    is_float,
    layer_of,
    maker,
    norms,
    replace_input,
    users,
    weight_names,
)
from tests.builders.mutants.weights import ATTENTION_OUT


def _attention(model: onnx.ModelProto, layer: int) -> onnx.NodeProto | None:
    return next((node for node in users(model, "Attention") if layer_of(node) == layer), None)


def _readers(model: onnx.ModelProto, value: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if value in node.input]


def _becomes(node: onnx.NodeProto, source: str) -> bool:
    """The node hands on one value unchanged."""
    node.op_type = "Identity"
    node.input[:] = [source]
    del node.attribute[:]
    return True


def _through(model: onnx.ModelProto, node: onnx.NodeProto, at: int, dtype: int) -> bool:
    """One input of a node is rounded to another type and back."""
    low = insert(model, node, "Cast", [node.input[at]])
    lower = maker(model, low)
    assert lower is not None
    lower.attribute.append(helper.make_attribute("to", dtype))
    back = insert(model, node, "Cast", [low])
    higher = maker(model, back)
    assert higher is not None
    higher.attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
    node.input[at] = back
    return True


# --- attention --------------------------------------------------------------------------------------------------------


def key_heads_swapped(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer's query heads read each other's keys; the cache leaves as it should."""
    node = _attention(model, 1)
    if node is None:
        return False
    past = next(port for port in model.graph.input if port.name == "past_key_values.1.key")
    heads = np.arange(past.type.tensor_type.shape.dim[1].dim_value)
    order = add_constant(model, np.concatenate([heads[1::-1], heads[2:]]))
    swapped = insert(model, node, "Gather", [node.input[1], order])
    gather = maker(model, swapped)
    assert gather is not None
    gather.attribute.append(helper.make_attribute("axis", 1))
    node.input[1] = swapped
    return True


def query_not_rotated(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer's queries have no position."""
    node = _attention(model, 1)
    rotated = maker(model, node.input[0]) if node is not None else None
    straight = maker(model, rotated.input[0]) if rotated is not None else None
    if node is None or straight is None or straight.op_type != "Mul":
        return False
    node.input[0] = straight.input[0]
    return True


def query_in_half_precision(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer's queries go through float16."""
    node = _attention(model, 2)
    return node is not None and _through(model, node, 0, TensorProto.FLOAT16)


def cached_key_not_rotated(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer caches its keys before they are rotated: right for a prompt, wrong from the first step on."""
    concat = maker(model, "present.1.key")
    rotated = maker(model, concat.input[1]) if concat is not None else None
    straight = maker(model, rotated.input[0]) if rotated is not None else None
    if concat is None or straight is None or straight.op_type != "Mul":
        return False
    for node in _readers(model, "present.1.key"):
        replace_input(node, "present.1.key", "kept.1.key")
    stale = helper.make_node("Concat", [concat.input[0], straight.input[0]], ["present.1.key"], name="mutant/stale")
    stale.attribute.append(helper.make_attribute("axis", -2))
    concat.output[:] = ["kept.1.key"]
    model.graph.node.append(stale)
    return True


def mask_of_the_first_row(model: onnx.ModelProto, folder: Path) -> bool:
    """Every sequence of a batch is masked as the first one."""
    takers = [node for node in _readers(model, "attention_mask") if node.op_type == "Cast"]
    for node in takers:
        bounds = [add_constant(model, np.array([number], dtype=np.int64)) for number in (0, 1, 0)]
        node.input[0] = insert(model, node, "Slice", ["attention_mask", *bounds])
    return bool(takers)


def mask_too_weak(model: onnx.ModelProto, folder: Path) -> bool:
    """What is masked loses ten instead of everything."""
    return _masked_by(model, -10.0)


def mask_of_ten_thousand(model: onnx.ModelProto, folder: Path) -> bool:
    """What is masked loses 10,000, as in the code of older models."""
    return _masked_by(model, -1e4)


def _masked_by(model: onnx.ModelProto, number: float) -> bool:
    for tensor, value in list(constants(model)):
        if is_float(value) and value.size == 1 and float(value.ravel()[0]) < -6e4:
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(value, number), tensor.name))
            return True
    return False


# --- positions --------------------------------------------------------------------------------------------------------


def positions_end(model: onnx.ModelProto, folder: Path) -> bool:
    """Positions stop at 31, as if a table had been folded at export."""
    takers = _readers(model, "position_ids")
    for node in takers:
        clipped = insert(model, node, "Min", ["position_ids", add_constant(model, np.int64(31))])
        replace_input(node, "position_ids", clipped)
    return bool(takers)


def positions_stretched(model: onnx.ModelProto, folder: Path) -> bool:
    """Rotary angles are 0.1 % too large."""
    for node in users(model, "Cos") + users(model, "Sin"):
        node.input[0] = insert(model, node, "Mul", [node.input[0], add_constant(model, np.float32(1.001))])
    return bool(users(model, "Cos"))


def rotated_backwards(model: onnx.ModelProto, folder: Path) -> bool:
    """Rotary angles have the other sign."""
    for node in users(model, "Sin"):
        node.input[0] = insert(model, node, "Neg", [node.input[0]])
    return bool(users(model, "Sin"))


# --- layers -----------------------------------------------------------------------------------------------------------


def last_layer_skipped(model: onnx.ModelProto, folder: Path) -> bool:
    """The final norm reads the layer before the last."""
    last = max(layer_of(node) for node in model.graph.node)
    found = False
    for node in model.graph.node:
        if re.match(r"(model\.norm|transformer\.ln_f)/", node.name):
            for at, name in enumerate(node.input):
                before = re.sub(rf"^(.*(?:layers|h))\.{last}((?:\.mlp)?/)", rf"\g<1>.{last - 1}\g<2>", name)
                if before != name and maker(model, before) is not None:
                    node.input[at], found = before, True
    return found


def norm_skipped(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer's first norm only multiplies by its weight."""
    for node in users(model, "RMSNormalization"):
        if layer_of(node) == 1:
            node.op_type = "Mul"
            del node.attribute[:]
            return True
    for node in users(model, "Reciprocal"):
        if layer_of(node) == 1:
            for reader in _readers(model, node.output[0]):
                _becomes(reader, next(name for name in reader.input if name != node.output[0]))
            return True
    return False


def norm_weight_without_one(model: onnx.ModelProto, folder: Path) -> bool:
    """One norm multiplies by its weight where it should by one more."""
    for node in users(model, "Add"):
        weights = [name for name in node.input if _source(model, name).endswith("norm.weight")]
        if layer_of(node) == 1 and weights:
            return _becomes(node, weights[0])
    return False


def _source(model: onnx.ModelProto, name: str) -> str:
    """The name of what a value is a cast of, or its own."""
    cast = maker(model, name)
    return cast.input[0] if cast is not None and cast.op_type == "Cast" else name


def embedding_not_scaled(model: onnx.ModelProto, folder: Path) -> bool:
    """Embeddings are not multiplied by the root of their size."""
    for node in users(model, "Mul"):
        source = maker(model, node.input[0])
        if source is not None and source.op_type == "Gather" and "embed" in source.name:
            return _becomes(node, node.input[0])
    return False


def gate_and_up_swapped(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer's activation is of the wrong projection."""
    for node in users(model, "Mul"):
        first, second = (maker(model, name) for name in node.input)
        if layer_of(node) == 2 and node.name.endswith("mlp/Mul") and first is not None and second is not None:
            gate, up = _gate_of(model, first), second.output[0]
            for reader in [n for n in model.graph.node if gate in n.input and n is not node]:
                replace_input(reader, gate, up)
            replace_input(node, up, gate)
            _in_order(model, second)
            return True
    return False


def _gate_of(model: onnx.ModelProto, activated: onnx.NodeProto) -> str:
    """What an activation is of: `Gelu(gate)`, or `gate * Sigmoid(gate)`."""
    return str(activated.input[0])


def _in_order(model: onnx.ModelProto, late: onnx.NodeProto) -> None:
    """A projection and its own nodes go in front of whatever reads them now."""
    scope = late.name.rpartition("/")[0]
    nodes = list(model.graph.node)
    moved = [node for node in nodes if node.name.startswith(f"{scope}/")]
    first = min(at for at, node in enumerate(nodes) if late.output[0] in node.input)
    rest = [node for node in nodes if node not in moved]
    place = rest.index(nodes[first])
    ordered = [onnx.NodeProto.FromString(n.SerializeToString()) for n in [*rest[:place], *moved, *rest[place:]]]
    del model.graph.node[:]
    model.graph.node.extend(ordered)


def hidden_in_bfloat16(model: onnx.ModelProto, folder: Path) -> bool:
    """The sum after one layer's attention goes through bfloat16."""
    for node in users(model, "Add"):
        if re.search(r"(layers|h)\.2(\.\w+)?/Add$", node.name) and "norm" not in node.name:
            return _through(model, node, 0, TensorProto.BFLOAT16)
    return False


# --- head -------------------------------------------------------------------------------------------------------------


def logits_in_half_precision(model: onnx.ModelProto, folder: Path) -> bool:
    """Logits go through float16."""
    node = maker(model, "logits")
    return node is not None and _through(model, node, 0, TensorProto.FLOAT16)


def last_token_unknown(model: onnx.ModelProto, folder: Path) -> bool:
    """The last token of the vocabulary has the embedding of the one before."""
    for node in users(model, "Gather"):
        if node.input[1] == "input_ids":
            rows = initializer(model, node.input[0])
            if rows is None:
                continue
            limit = add_constant(model, np.int64(rows.dims[0] - 2))
            node.input[1] = insert(model, node, "Min", ["input_ids", limit])
            return True
    return False


def weight_one_row_off(model: onnx.ModelProto, folder: Path) -> bool:
    """One weight is read from the row after its first."""
    tensor = initializer(model, weight_names(model, ATTENTION_OUT.format(1))[0])
    assert tensor is not None
    for entry in tensor.external_data:
        if entry.key == "offset":
            entry.value = str(int(entry.value) + 4 * tensor.dims[1])
    return True


def epsilon_of_every_norm(model: onnx.ModelProto, folder: Path) -> bool:
    """Every norm has a fifth more epsilon."""
    found = False
    for node in norms(model):
        epsilon = attribute(node, "epsilon")
        if epsilon is not None:
            epsilon.f, found = epsilon.f * 1.2, True
    for node in users(model, "Add"):
        value = constant_value(model, node.input[1])
        if "norm" in node.name and value is not None and value.size == 1 and 0 < float(value.ravel()[0]) < 1e-3:
            node.input[1], found = add_constant(model, value * np.float32(1.2)), True
    return found
