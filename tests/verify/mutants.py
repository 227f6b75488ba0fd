"""Faulty graphs by surgery on real exports: one small, plausible bug each.

A mutant is a function that changes the graph in place, or returns False where the graph has no such place. Places are
found by operator and by weight name, never by the exporter's node order. `in_weights` mutants touch the folder's
safetensors file instead and are judged against the clean folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from llmconv.runtime.guard import external_fields
from llmconv.safetensors_io import read_header
from llmconv.tensors import Array

ROTARY = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
ALL = (*ROTARY, "gpt2", "bloom")

Surgery = Callable[[onnx.ModelProto, Path], bool]


@dataclass(frozen=True)
class Mutant:
    """One bug: its name, the surgery that makes it, and the families that have a place for it."""

    name: str
    apply: Surgery
    families: tuple[str, ...] = ALL


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto | None:
    """The initializer of that name."""
    return next((tensor for tensor in model.graph.initializer if tensor.name == name), None)


def weight_names(model: onnx.ModelProto, pattern: str) -> list[str]:
    """Initializers whose name matches."""
    return [tensor.name for tensor in model.graph.initializer if re.search(pattern, tensor.name)]


def constants(model: onnx.ModelProto) -> Iterator[tuple[onnx.TensorProto, Array]]:
    """The initializers that are kept inline, with their values."""
    for tensor in model.graph.initializer:
        if not tensor.external_data:
            yield tensor, numpy_helper.to_array(tensor)


def constant_value(model: onnx.ModelProto, name: str) -> Array | None:
    """The value of an inline initializer."""
    tensor = initializer(model, name)
    return None if tensor is None or tensor.external_data else numpy_helper.to_array(tensor)


def users(model: onnx.ModelProto, op: str) -> list[onnx.NodeProto]:
    """Nodes of one operator."""
    return [node for node in model.graph.node if node.op_type == op]


def maker(model: onnx.ModelProto, output: str) -> onnx.NodeProto | None:
    """The node that makes a value."""
    return next((node for node in model.graph.node if output in node.output), None)


def layer_of(node: onnx.NodeProto) -> int:
    """The layer that a node's scope or weights name, -1 for none."""
    for text in (node.name, *node.input):
        found = re.search(r"\b(?:layers|h)\.(\d+)\b", text)
        if found:
            return int(found.group(1))
    return -1


def add_constant(model: onnx.ModelProto, value: Array | np.generic) -> str:
    """A new inline initializer's name."""
    name = f"mutant_{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return name


def insert(model: onnx.ModelProto, before: onnx.NodeProto, op: str, inputs: list[str]) -> str:
    """A new node in front of another; its output's name."""
    output = f"mutant_value_{len(model.graph.node)}"
    index = next(index for index, node in enumerate(model.graph.node) if node is before or node == before)
    model.graph.node.insert(index, helper.make_node(op, inputs, [output], name=output))
    return output


def replace_input(node: onnx.NodeProto, old: str, new: str) -> None:
    """Rewires one node."""
    for index, name in enumerate(node.input):
        if name == old:
            node.input[index] = new


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    """A node's attribute."""
    return next((item for item in node.attribute if item.name == name), None)


def make_inline(model: onnx.ModelProto, name: str, folder: Path, change: Callable[[Array], Array]) -> bool:
    """Replaces a mapped weight by a changed copy inside the graph."""
    tensor = initializer(model, name)
    assert tensor is not None
    fields = external_fields(tensor)
    raw = (folder / fields["location"]).read_bytes()[int(fields["offset"]) :][: int(fields["length"])]
    values = np.frombuffer(raw, np.float32).reshape(tuple(tensor.dims))
    changed = np.ascontiguousarray(change(values.copy()), dtype=np.float32)
    tensor.CopyFrom(numpy_helper.from_array(changed, name))
    return True


# --- norms, activations, scales ---------------------------------------------------------------------------------------


def epsilon_of_one_norm(model: onnx.ModelProto, folder: Path) -> bool:
    """One layer's norm has ten times the epsilon."""
    for node in users(model, "LayerNormalization"):
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
        if value.dtype == np.float32 and value.size == 1 and float(value.ravel()[0]) == 30.0:
            tensor.CopyFrom(numpy_helper.from_array(value * np.float32(1.1), tensor.name))
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
            factor = add_constant(model, np.float32(1.001))
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
        if value.dtype == np.float32 and value.size == 4 and float(value.ravel()[0]) == 0.25:
            changed = value.copy()
            changed.ravel()[1] *= 1.01
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


# --- weights and wiring -----------------------------------------------------------------------------------------------

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


def flip_bit(bit: int) -> Surgery:
    """Flips one bit of one weight in the folder's file, not in the graph."""

    def apply(model: onnx.ModelProto, folder: Path) -> bool:
        name = weight_names(model, ATTENTION_OUT.format(1))[0]
        tensor = read_header(folder / "model.safetensors").tensors[name]
        with open(folder / "model.safetensors", "r+b") as file:
            file.seek(tensor.offset + 40 + bit // 8)
            (value,) = file.read(1)
            file.seek(tensor.offset + 40 + bit // 8)
            file.write(bytes([value ^ (1 << bit % 8)]))
        return True

    return apply


MUTANTS = (
    Mutant("one norm's epsilon times ten", epsilon_of_one_norm),
    Mutant("attention scale 1 % off in one layer", attention_scale),
    Mutant("attention softcap dropped in one layer", attention_softcap, ("gemma2",)),
    Mutant("final softcap 10 % off", final_softcap, ("gemma2",)),
    Mutant("activation in another form", activation),
    Mutant("activation constant rounded", activation_constant, ("gpt2", "bloom")),
    Mutant("causal mask too narrow", causal_too_narrow),
    Mutant("causal mask too wide", causal_too_wide),
    Mutant("padding ignored", padding_ignored),
    Mutant("window off by one", window_off_by_one, ("gemma2",)),
    Mutant("window dropped", window_dropped, ("gemma2",)),
    Mutant("positions off by one", positions_off_by_one, (*ROTARY, "gpt2")),
    Mutant("position_ids ignored", positions_ignored, (*ROTARY, "gpt2")),
    Mutant("rotary base changed", rotary_table(lambda table: table ** np.float32(1.01)), ROTARY),
    Mutant("rotary table in half precision", rotary_table(lambda table: table.astype(np.float16)), ROTARY),
    Mutant("ALiBi slope 1 % off", alibi_slopes, ("bloom",)),
    Mutant("two present names swapped", present_names_swapped),
    Mutant("key and value swapped", key_value_swapped),
    Mutant("two pasts swapped", past_swapped),
    Mutant("two layers' weights swapped", layers_swapped),
    Mutant("square weight transposed", transposed_weight),
    Mutant("bias dropped", bias_dropped, ("qwen2", "gpt2", "bloom")),
    Mutant("first side of a residual dropped", residual_branch_dropped(0)),
    Mutant("second side of a residual dropped", residual_branch_dropped(1)),
    Mutant("stale weight", stale_weight),
    Mutant("LoRA scale 1 % off", lora_scale),
    Mutant("one weight through bfloat16", bfloat16_weight),
    Mutant("untied head tied", head_is_embedding, ("llama", "mistral", "qwen3")),
    Mutant("low bit of one weight flipped", flip_bit(0)),
    Mutant("exponent bit of one weight flipped", flip_bit(23)),
)
