"""Faulty graphs by surgery on real exports: one small, plausible bug each.

A mutant is a function that changes the graph in place, or returns False where the graph has no such place. Places are
found by operator and by weight name, never by the exporter's node order. `in_weights` mutants touch the folder's
safetensors file instead and are judged against the clean folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.tensors import Array
from tests.builders.mutants.surgery import (
    add_constant,
    attribute,
    constant_value,
    constants,
    float_type,
    insert,
    is_float,
    layer_of,
    maker,
    norms,
    replace_input,
    users,
)
from tests.builders.mutants.weights import (
    Surgery,
    bfloat16_weight,
    bias_dropped,
    flip_bit,
    head_is_embedding,
    layers_swapped,
    lora_scale,
    residual_branch_dropped,
    stale_weight,
    transposed_weight,
)
from tests.builders.mutants.wiring import (
    cached_key_not_rotated,
    embedding_not_scaled,
    epsilon_of_every_norm,
    gate_and_up_swapped,
    hidden_in_bfloat16,
    key_heads_swapped,
    last_layer_skipped,
    last_token_unknown,
    logits_in_half_precision,
    mask_of_ten_thousand,
    mask_of_the_first_row,
    mask_too_weak,
    norm_skipped,
    norm_weight_without_one,
    positions_end,
    positions_stretched,
    query_in_half_precision,
    query_not_rotated,
    rotated_backwards,
    weight_one_row_off,
)

ROTARY = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
ALL = (*ROTARY, "gpt2", "bloom")
CAPLESS = tuple(family for family in ALL if family != "gemma2")
"""Where no softcap keeps the scores so small that any mask hides them."""


@dataclass(frozen=True)
class Mutant:
    """One bug: its name, the surgery that makes it, the families that have a place for it, and where it is.

    Attributes:
        layer: the first layer that computes something else; None for what comes after the layers.
    """

    name: str
    apply: Surgery
    families: tuple[str, ...] = ALL
    layer: int | None = 1

    def is_at(self, layer: int | None, num_layers: int) -> bool:
        """Whether the first layer whose keys or values differ brackets the bug.

        Keys and values of a layer are made by its first half, so what happens later in it shows in the next one, and
        what happens late in the last layer in the logits.
        """
        if layer is None:
            return self.layer is None or self.layer == num_layers - 1
        return self.layer is not None and layer in (self.layer, self.layer + 1)


# --- norms, activations, scales ---------------------------------------------------------------------------------------


def epsilon_of_one_norm(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer's norm has ten times the epsilon."""
    for node in norms(model):
        epsilon = attribute(node, "epsilon")
        if layer_of(node) == 1 and epsilon is not None:
            epsilon.f *= 10
            return True
    for node in users(model, "Add"):
        value = constant_value(model, node.input[1])
        if layer_of(node) == 1 and value is not None and value.size == 1 and 0 < float(value.ravel()[0]) < 1e-3:
            node.input[1] = add_constant(model, value * 10)
            return True
    return False


def attention_scale(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer's attention is scaled by 1 % too much."""
    for node in users(model, "Attention"):
        scale = attribute(node, "scale")
        if layer_of(node) == 1 and scale is not None:
            scale.f *= 1.01
            return True
    for node in users(model, "Mul"):
        value = constant_value(model, node.input[1])
        if layer_of(node) == 1 and value is not None and value.size == 1 and maker_op(model, node.input[0]) == "MatMul":
            node.input[1] = add_constant(model, value * np.float32(1.01))
            return True
    return False


def maker_op(model: onnx.ModelProto, output: str) -> str:
    """The operator that makes a value."""
    node = maker(model, output)
    return node.op_type if node else ""


def attention_softcap(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer's attention scores are not capped."""
    for node in users(model, "Attention"):
        softcap = attribute(node, "softcap")
        if layer_of(node) == 2 and softcap is not None and softcap.f:
            node.attribute.remove(softcap)
            return True
    return False


def final_softcap(model: onnx.ModelProto, folder: Path) -> bool:
    """The cap of the logits is 33 instead of 30."""
    for tensor, value in list(constants(model)):
        if is_float(value) and value.size == 1 and float(value.ravel()[0]) == 30.0:
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(value, 33.0), tensor.name))
            return True
    return False


def activation(model: onnx.ModelProto, folder: Path) -> bool:
    """The activation of one layer is its near relative: erf for tanh, a quick sigmoid."""
    for node in users(model, "Gelu"):
        if layer_of(node) == 1:
            del node.attribute[:]
            return True
    for node in users(model, "Sigmoid"):
        if layer_of(node) == 1:
            factor = add_constant(model, np.asarray(1.001, float_type(model)))
            node.input[0] = insert(model, node, "Mul", [node.input[0], factor])
            return True
    return _gelu_by_erf(model)


def _gelu_by_erf(model: onnx.ModelProto) -> bool:
    """Replaces the last product of x / 2 * (1 + tanh(...)) by Gelu(x)."""
    for half in users(model, "Mul"):
        value = constant_value(model, half.input[1])
        if layer_of(half) == 1 and value is not None and value.size == 1 and float(value.ravel()[0]) == 0.5:
            last = next(node for node in users(model, "Mul") if half.output[0] in node.input)
            last.op_type = "Gelu"
            last.input[:] = [half.input[0]]
            return True
    return False


def activation_constant(model: onnx.ModelProto, folder: Path) -> bool:
    """The constant of one layer's tanh GELU is rounded to 0.0447."""
    for node in users(model, "Mul"):
        for index, name in enumerate(node.input):
            value = constant_value(model, name)
            if layer_of(node) != 1 or value is None or value.size != 1:
                continue
            if abs(float(value.ravel()[0]) - 0.044715) < 1e-6:
                node.input[index] = add_constant(model, np.float32(0.0447).reshape(value.shape))
                return True
    return False


def clips_dropped(layer: int | None = None) -> Surgery:
    """Nothing is clipped any more: in one layer, or anywhere."""

    def apply(model: onnx.ModelProto, folder: Path) -> bool:
        found = [node for node in users(model, "Clip") if layer is None or layer_of(node) == layer]
        for node in found:
            node.op_type = "Identity"
            del node.input[1:]
        return bool(found)

    return apply


# --- masks and positions ----------------------------------------------------------------------------------------------


def causal_too_narrow(model: onnx.ModelProto, folder: Path) -> bool:
    """A token does not see itself."""
    for node in users(model, "LessOrEqual"):
        node.op_type = "Less"
        return True
    return False


def causal_too_wide(model: onnx.ModelProto, folder: Path) -> bool:
    """A token sees the next one."""
    for node in users(model, "LessOrEqual"):
        one = add_constant(model, np.int64(1))
        node.input[1] = insert(model, node, "Add", [node.input[1], one])
        return True
    return False


def padding_ignored(model: onnx.ModelProto, folder: Path) -> bool:
    """Padding is attended to."""
    found = False
    for node in list(users(model, "Cast")):
        value = node.input[0]
        to = attribute(node, "to")
        source = value if value == "attention_mask" else next(iter(getattr(maker(model, value), "input", [])), "")
        if source == "attention_mask" and to is not None and to.i == onnx.TensorProto.BOOL:
            node.input[0] = insert(model, node, "Equal", [value, value])
            found = True
    return found


def window_off_by_one(model: onnx.ModelProto, folder: Path) -> bool:
    """The sliding window is one token too long."""
    return _change_window(model, 9)


def window_too_short(model: onnx.ModelProto, folder: Path) -> bool:
    """The sliding window is one token too short."""
    return _change_window(model, 7)


def window_dropped(model: onnx.ModelProto, folder: Path) -> bool:
    """The sliding window never ends."""
    return _change_window(model, 1 << 30)


def _change_window(model: onnx.ModelProto, width: int) -> bool:
    for node in users(model, "Sub"):
        value = constant_value(model, node.input[1])
        if value is not None and value.dtype == np.int64 and value.size == 1 and int(value.ravel()[0]) == 8:
            node.input[1] = add_constant(model, np.full_like(value, width))
            return True
    return False


def positions_off_by_one(model: onnx.ModelProto, folder: Path) -> bool:
    """Every position is one too high, except where the table ends."""
    return _change_positions(
        model, lambda node: insert(model, node, "Add", ["position_ids", add_constant(model, np.int64(1))])
    )


def positions_ignored(model: onnx.ModelProto, folder: Path) -> bool:
    """Positions count from the start of the cache, whatever `position_ids` says."""
    counted = next((node.output[0] for node in users(model, "Add") if maker_op(model, node.input[0]) == "Range"), "")

    def count(node: onnx.NodeProto) -> str:
        nothing = insert(model, node, "Mul", ["position_ids", add_constant(model, np.int64(0))])
        return insert(model, node, "Add", [nothing, counted])

    return bool(counted) and _change_positions(model, count)


def _change_positions(model: onnx.ModelProto, make: Callable[[onnx.NodeProto], str]) -> bool:
    takers = [node for node in model.graph.node if "position_ids" in node.input]
    for node in takers:
        replace_input(node, "position_ids", make(node))
    if takers:  # Gather needs values in order: whatever the rotary part is, producers come first
        _sort(model)
    return bool(takers)


def _sort(model: onnx.ModelProto) -> None:
    """Nodes in an order in which every value is made before it is used."""
    made = {tensor.name for tensor in model.graph.initializer} | {port.name for port in model.graph.input} | {""}
    waiting, ordered = list(model.graph.node), []
    while waiting:
        ready = [node for node in waiting if all(name in made for name in node.input)]
        assert ready
        ordered += ready
        made |= {name for node in ready for name in node.output}
        waiting = [node for node in waiting if node not in ready]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def rotary_table(change: Callable[[Array], Array]) -> Surgery:
    """Changes the rotary frequencies."""

    def apply(model: onnx.ModelProto, folder: Path) -> bool:
        for tensor, value in list(constants(model)):
            if value.dtype == np.float32 and value.size > 2 and float(value.ravel()[0]) == 1.0:
                tensor.CopyFrom(numpy_helper.from_array(change(value).astype(np.float32), tensor.name))
                return True
        return False

    return apply


def alibi_slopes(model: onnx.ModelProto, folder: Path) -> bool:
    """One head's ALiBi slope is 1 % too steep."""
    for tensor, value in list(constants(model)):
        if is_float(value) and value.size == 4 and float(value.ravel()[0]) == 0.25:
            changed = value.copy()
            changed.ravel()[1] = float(changed.ravel()[1]) * 1.01
            tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
            return True
    return False


# --- cache ------------------------------------------------------------------------------------------------------------


def _rename_outputs(model: onnx.ModelProto, first: str, second: str, *, follow: bool) -> bool:
    """Swaps the names of two values; `follow` keeps their users reading what they read before."""
    swap = {first: second, second: first}
    for node in model.graph.node:
        node.output[:] = [swap.get(name, name) for name in node.output]
        if follow:
            node.input[:] = [swap.get(name, name) for name in node.input]
    if not follow:
        _sort(model)
    return True


def present_names_swapped(model: onnx.ModelProto, folder: Path) -> bool:
    """Two layers' keys leave under each other's name."""
    return _rename_outputs(model, "present.1.key", "present.2.key", follow=True)


def key_value_swapped(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer's keys leave as values, and the reverse."""
    return _rename_outputs(model, "present.2.key", "present.2.value", follow=True)


def past_swapped(model: onnx.ModelProto, folder: Path) -> bool:
    """Two layers read each other's past keys; nothing shows while the past is empty."""
    swap = {"past_key_values.1.key": "past_key_values.2.key", "past_key_values.2.key": "past_key_values.1.key"}
    for node in model.graph.node:
        node.input[:] = [swap.get(name, name) for name in node.input]
    return True


MUTANTS = (
    Mutant("one norm's epsilon times ten", epsilon_of_one_norm),
    Mutant("attention scale 1 % off in one layer", attention_scale),
    Mutant("attention softcap dropped in one layer", attention_softcap, ("gemma2",), layer=2),
    Mutant("final softcap 10 % off", final_softcap, ("gemma2",), layer=None),
    Mutant("activation in another form", activation),
    Mutant("activation constant rounded", activation_constant, ("gpt2", "bloom")),
    Mutant("causal mask too narrow", causal_too_narrow, layer=0),
    Mutant("causal mask too wide", causal_too_wide, layer=0),
    Mutant("padding ignored", padding_ignored, layer=0),
    Mutant("window off by one", window_off_by_one, ("gemma2",), layer=0),
    Mutant("window dropped", window_dropped, ("gemma2",), layer=0),
    Mutant("positions off by one", positions_off_by_one, (*ROTARY, "gpt2"), layer=0),
    Mutant("position_ids ignored", positions_ignored, (*ROTARY, "gpt2"), layer=0),
    Mutant("rotary base changed", rotary_table(lambda table: table ** np.float32(1.01)), ROTARY, layer=0),
    Mutant("rotary table in half precision", rotary_table(lambda table: table.astype(np.float16)), ROTARY, layer=0),
    Mutant("ALiBi slope 1 % off", alibi_slopes, ("bloom",), layer=0),
    Mutant("two present names swapped", present_names_swapped),
    Mutant("key and value swapped", key_value_swapped, layer=2),
    Mutant("two pasts swapped", past_swapped),
    Mutant("two layers' weights swapped", layers_swapped),
    Mutant("square weight transposed", transposed_weight),
    Mutant("bias dropped", bias_dropped, ("qwen2", "gpt2", "bloom")),
    Mutant("first side of a residual dropped", residual_branch_dropped(0), layer=2),
    Mutant("second side of a residual dropped", residual_branch_dropped(1), layer=2),
    Mutant("stale weight", stale_weight),
    Mutant("LoRA scale 1 % off", lora_scale),
    Mutant("one weight through bfloat16", bfloat16_weight),
    Mutant("untied head tied", head_is_embedding, ("llama", "mistral", "qwen3"), layer=None),
    Mutant("every norm's epsilon a fifth too large", epsilon_of_every_norm, layer=0),
    Mutant("window one too short", window_too_short, ("gemma2",), layer=0),
    Mutant("key heads swapped", key_heads_swapped, (*ROTARY, "gpt2")),
    Mutant("query not rotated in one layer", query_not_rotated, ROTARY),
    Mutant("query in half precision in one layer", query_in_half_precision, (*ROTARY, "gpt2"), layer=2),
    Mutant("key cached before it is rotated", cached_key_not_rotated, ROTARY),
    Mutant("mask of the first row for all", mask_of_the_first_row, ROTARY, layer=0),
    Mutant("mask too weak", mask_too_weak, layer=0),
    Mutant("mask of -10,000", mask_of_ten_thousand, CAPLESS, layer=0),
    Mutant("positions end at 31", positions_end, (*ROTARY, "gpt2"), layer=0),
    Mutant("rotary angles 0.1 % too large", positions_stretched, ROTARY, layer=0),
    Mutant("rotated backwards", rotated_backwards, ROTARY, layer=0),
    Mutant("last layer skipped", last_layer_skipped, layer=None),
    Mutant("one norm skipped", norm_skipped, ROTARY),
    Mutant("norm weight without the one", norm_weight_without_one, ("gemma2",)),
    Mutant("embedding not scaled", embedding_not_scaled, ("gemma2",), layer=0),
    Mutant("gate and up projection swapped", gate_and_up_swapped, ROTARY, layer=2),
    Mutant("hidden state through bfloat16", hidden_in_bfloat16, layer=2),
    Mutant("logits in half precision", logits_in_half_precision, layer=None),
    Mutant("last token of the vocabulary unknown", last_token_unknown, (*ROTARY, "bloom"), layer=0),
    Mutant("weight read one row late", weight_one_row_off),
    Mutant("low bit of one weight flipped", flip_bit(0)),
    Mutant("exponent bit of one weight flipped", flip_bit(23)),
)

VOID_IN = {
    "float16": {
        "activation constant rounded",
        "low bit of one weight flipped",
        "query in half precision in one layer",
        "logits in half precision",
        "mask of -10,000",
    },
    "bfloat16": {
        "activation constant rounded",
        "low bit of one weight flipped",
        "query in half precision in one layer",
        "logits in half precision",
        "one weight through bfloat16",
        "hidden state through bfloat16",
        "stale weight",
    },
}
"""Mutants that are no fault of a graph in half precision: rounding makes the same graph of them."""
