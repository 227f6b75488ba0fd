"""A graph falls into its layers by what nodes compute, whatever the names and the order of the nodes."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify.layers.graph_index import NotLayered
from llmconv.verify.layers.graph_layers import GraphLayers, add_before_norms
from llmconv.verify.layers.layer_checks import GraphRun, HiddenStates, LayerRuns, made_up_call
from tests.builders.layered_models import CLASSES, change_layer, load, rename, shuffle
from tests.builders.mutants.surgery import users
from tests.verify.layers.conftest import Layered, induction

FAMILIES = [pytest.param(name, marks=() if name in {"llama", "gpt2"} else pytest.mark.slow) for name in CLASSES]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_layers_that_are_alike_are_a_class(model_type: str, layered: Layered) -> None:
    found = induction(layered(model_type))
    assert found.classes.classes == CLASSES[model_type]
    assert found.kept == tuple(numbers[0] for numbers in CLASSES[model_type])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_and_order_of_nodes_do_not_matter(model_type: str, layered: Layered) -> None:
    for seed in range(3):
        model = load(layered(model_type))
        rename(model, seed)
        shuffle(model, seed)
        found = induction(layered(model_type), model)
        assert found.classes.classes == CLASSES[model_type]
        assert not found.odd_layers()


@pytest.mark.slow_rows("gpt2")
@pytest.mark.quick_rows("gpt2")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_values_at_the_cuts_are_the_hidden_states_of_the_model(model_type: str, layered: Layered) -> None:
    folder = layered(model_type)
    layers, names = GraphLayers.of(load(folder)), induction(folder).classes.names
    call = made_up_call(layers, 96, {})
    whole = range(len(layers.index.nodes))
    nothing = HiddenStates()
    runs = LayerRuns(call, nothing, nothing, (), torch.zeros(0))
    run = GraphRun("decode.onnx", layers, folder, SessionSettings(), runs, {}, {})
    found = {layer.exit: run.run(whole, layer.exit)[layer.exit] for layer in layers.layers}
    eager, seen = EagerRunner(folder), []
    for name in names:
        eager.model.get_submodule(name).register_forward_hook(lambda *args: seen.append(args[-1]))
    eager.prefill(call.input_ids, call.attention_mask, call.position_ids, call.start)
    valid = torch.from_numpy(call.valid)
    for layer, result in zip(layers.layers, seen, strict=True):
        wanted = result[0] if isinstance(result, tuple) else result
        torch.testing.assert_close(torch.from_numpy(found[layer.exit])[valid], wanted[valid], atol=1e-4, rtol=1e-4)


def test_every_node_is_in_one_part(layered: Layered) -> None:
    layers = GraphLayers.of(load(layered("llama")))
    parts = [*layers.prologue, *(at for layer in layers.layers for at in layer.nodes), *layers.epilogue]
    assert sorted(parts) == list(range(len(load(layered("llama")).graph.node)))


def test_a_layer_with_a_changed_node_is_a_class_of_its_own_and_the_node_is_named(layered: Layered) -> None:
    model = load(layered("llama"))
    node = change_layer(model, 2)
    found = induction(layered("llama"), model)
    assert found.classes.classes == [[0, 1, 3], [2]]
    assert re.search(rf"layer 2 differs from the 3 others of its kind: node `{re.escape(node)}`", found.odd_layers()[2])


def test_layers_that_read_each_others_weights_are_classes_of_their_own(layered: Layered) -> None:
    model = load(layered("llama"))
    _exchange(model, "model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight")
    found = induction(layered("llama"), model)
    assert found.classes.classes == [[0, 3], [1], [2]]


def test_a_cache_of_another_layer_is_refused(layered: Layered) -> None:
    model = load(layered("llama"))
    _exchange(model, "past_key_values.1.key", "past_key_values.2.key")
    with pytest.raises(NotLayered, match="reads"):
        GraphLayers.of(model)


def test_a_value_that_skips_a_layer_is_refused(layered: Layered) -> None:
    model = load(layered("llama"))
    layers = GraphLayers.of(model)
    reader = next(at for at in layers.layers[2].nodes if layers.layers[2].entry in layers.index.nodes[at].input)
    node = model.graph.node[reader]
    node.input[:] = [layers.layers[1].entry if name == layers.layers[2].entry else name for name in node.input]
    with pytest.raises(NotLayered, match="layer"):
        GraphLayers.of(model)


@pytest.mark.parametrize("port", ["input", "output"])
def test_caches_in_another_order_are_refused(port: str, layered: Layered) -> None:
    model = load(layered("llama"))
    ports = getattr(model.graph, port)
    one, other = (at for at, each in enumerate(ports) if each.name.endswith((".1.key", ".2.key")))
    first, second = (onnx.ValueInfoProto.FromString(ports[at].SerializeToString()) for at in (one, other))
    ports[one].CopyFrom(second)
    ports[other].CopyFrom(first)
    with pytest.raises(NotLayered, match="not in the order of the layers"):
        GraphLayers.of(model)


def test_a_value_that_is_computed_twice_is_refused(layered: Layered) -> None:
    model = load(layered("llama"))
    scale = users(model, "Sigmoid") or users(model, "Swish") or users(model, "Mul")
    copy = onnx.NodeProto.FromString(scale[-1].SerializeToString())
    model.graph.node.append(copy)
    with pytest.raises(NotLayered, match="twice"):
        GraphLayers.of(model)


def test_a_cache_declared_with_another_type_is_a_class_of_its_own(layered: Layered) -> None:
    model = load(layered("llama"))
    port = next(port for port in model.graph.output if port.name == "present.2.key")
    port.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    assert induction(layered("llama"), model).classes.classes == [[0, 1, 3], [2]]


def test_a_value_declared_with_another_type_is_a_class_of_its_own(layered: Layered) -> None:
    model = load(layered("llama"))
    layers = GraphLayers.of(model)
    del model.graph.value_info[:]
    for layer in layers.layers:
        kind = onnx.TensorProto.FLOAT16 if layer.number == 2 else onnx.TensorProto.FLOAT
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(layer.exit, kind, None))
    assert induction(layered("llama"), model).classes.classes == [[0, 1, 3], [2]]


@pytest.mark.slow
def test_layers_that_share_caches_are_refused(layered: Layered) -> None:
    with pytest.raises(NotLayered):
        induction(layered("gemma3n_text"))


def test_one_layer_is_no_list_of_layers(layered: Layered) -> None:
    model = load(layered("llama"))
    kept = [tensor for tensor in model.graph.initializer if not re.search(r"layers\.[123]\.", tensor.name)]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    with pytest.raises(NotLayered, match="two or more layers"):
        GraphLayers.of(model)


def _exchange(model: onnx.ModelProto, one: str, other: str) -> None:
    names = {one: other, other: one}
    for node in model.graph.node:
        if node.op_type != "Shape":
            node.input[:] = [names.get(name, name) for name in node.input]


def test_a_norm_of_terms_of_different_shapes_fails_before_it_is_cut() -> None:
    """onnxruntime refuses such a norm, which an `Add` in its place would compute."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    constants = [helper.make_tensor(name, TensorProto.FLOAT, [4], [1.0] * 4) for name in ("skip", "gamma")]
    norm = helper.make_node("SkipSimplifiedLayerNormalization", ["x", "skip", "gamma"], ["y"], domain="com.microsoft")
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([norm], "g", [x], [y], constants), opset_imports=opsets, ir_version=10)
    ids = np.zeros((1, 3, 4), np.float32)
    for _ in range(2):  # as it is, and with the terms added before
        with pytest.raises(Exception, match="skip|Concat"):
            ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": ids})
        add_before_norms(model)
