"""Checks of graphs: references to files outside of the folder are refused before onnxruntime opens the graph."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmconv.errors import MalformedInput
from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.guard import load_guarded


def graph_with(folder: Path, op: str = "Identity", domain: str = "", **fields: str) -> Path:
    """A graph of one node with one weight of 16 bytes that lies where `fields` say."""
    (folder / "weights.bin").write_bytes(np.zeros(4, np.float32).tobytes())
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "weights.bin", **fields}.items():
        tensor.external_data.add(key=key, value=value)
    node = helper.make_node(op, ["w"], ["logits"], domain=domain)
    output = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [4])
    model = helper.make_model(
        helper.make_graph([node], "g", [], [output], [tensor]),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def test_a_range_inside_a_file_next_to_the_graph_is_accepted(tmp_path: Path) -> None:
    path = graph_with(tmp_path, offset="0", length="16")
    assert len(load_guarded(path).graph.initializer) == 1
    assert OrtGraph(path).outputs == {"logits": [4]}


@pytest.mark.parametrize(
    "location",
    [
        "../weights.bin",
        "/etc/passwd",
        "a/../../weights.bin",
        "..",
        "",
        "*/_ORT_MEM_ADDR_/*",
        "c:weights.bin",
        "a\\weights.bin",
        "weights.bin\x00",
        "folder/weights.bin",
        "a/b/model.safetensors",
        "../model.safetensors",
    ],
)
def test_a_location_that_is_not_a_plain_file_name_is_refused(tmp_path: Path, location: str) -> None:
    with pytest.raises(MalformedInput, match="not a plain file name"):
        load_guarded(graph_with(tmp_path, location=location))


def test_weights_of_a_module_lie_in_a_folder_next_to_the_graph_but_not_behind_a_link(tmp_path: Path) -> None:
    location = "2_Dense/model.safetensors"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.safetensors").write_bytes(bytes(16))
    (tmp_path / "2_Dense").symlink_to(tmp_path / "elsewhere")
    path = graph_with(tmp_path, location=location)
    with pytest.raises(MalformedInput, match="a link"):
        load_guarded(path)
    (tmp_path / "2_Dense").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "2_Dense")
    assert len(load_guarded(path).graph.initializer) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"length": "17"}, "beyond the end"),
        ({"offset": "8", "length": "16"}, "beyond the end"),
        ({"offset": str(1 << 80)}, "beyond the end"),
        ({"offset": "-1"}, "invalid offset or length"),
        ({"length": "0x10"}, "invalid offset or length"),
        ({"location": "missing.bin"}, "which is missing"),
        ({"__class__": "x"}, "unknown or duplicate keys"),
    ],
)
def test_a_range_that_does_not_fit_is_refused(tmp_path: Path, fields: dict[str, str], text: str) -> None:
    with pytest.raises(MalformedInput, match=text):
        load_guarded(graph_with(tmp_path, **fields))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path = graph_with(tmp_path, length="16")
    (tmp_path / "weights.bin").rename(tmp_path / "real.bin")
    os.symlink("real.bin", tmp_path / "weights.bin")
    with pytest.raises(MalformedInput, match="is a link or not a file"):
        load_guarded(path)


@pytest.mark.parametrize(("op", "domain"), [("EPContext", "com.microsoft"), ("Anything", "evil.example")])
def test_a_custom_operator_is_refused(tmp_path: Path, op: str, domain: str) -> None:
    with pytest.raises(MalformedInput, match="uses the unsupported operator"):
        load_guarded(graph_with(tmp_path, op, domain, length="16"))


def test_a_weight_hidden_in_a_subgraph_is_seen(tmp_path: Path) -> None:
    path = graph_with(tmp_path, location="../x")
    model = onnx.load(path, load_external_data=False)
    inner = onnx.GraphProto(name="inner")
    inner.initializer.append(model.graph.initializer[0])
    del model.graph.initializer[:]
    model.graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(MalformedInput, match="not a plain file name"):
        load_guarded(path)


@pytest.mark.parametrize("name", ["model.onnx", "model.json", "model.textproto"])
def test_a_file_that_is_not_a_graph_is_refused_whatever_its_suffix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"attention_bias": 1}' * 4)
    with pytest.raises(MalformedInput, match="not an ONNX file"):
        load_guarded(tmp_path / name)


def chain_of(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """A model of these nodes, from `x` to `y`."""
    taken, given = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y"))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", [taken], [given]), opset_imports=opsets, ir_version=10)


FIRST, SECOND = helper.make_node("Neg", ["x"], ["z"]), helper.make_node("Neg", ["z"], ["y"])


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ((SECOND, FIRST), "uses `z` before it is defined"),
        ((FIRST, FIRST, SECOND), "defines `z` twice"),
        ((FIRST, helper.make_node("Neg", ["z"], ["x"]), SECOND), "defines `x` twice"),
    ],
)
def test_nodes_that_are_not_sorted_are_refused(nodes: tuple[onnx.NodeProto, ...], problem: str, tmp_path: Path) -> None:
    onnx.save(chain_of(FIRST, SECOND), tmp_path / "right.onnx")
    load_guarded(tmp_path / "right.onnx")
    onnx.save(chain_of(*nodes), tmp_path / "wrong.onnx")
    with pytest.raises(MalformedInput, match=problem):
        load_guarded(tmp_path / "wrong.onnx")


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_a_function_in_the_domain_of_the_operators_is_refused(domain: str, tmp_path: Path) -> None:
    model = chain_of(FIRST, SECOND)
    body = [helper.make_node("Abs", ["a"], ["b"])]
    model.functions.append(helper.make_function(domain, "Neg", ["a"], ["b"], body, [helper.make_opsetid("", 20)]))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(MalformedInput, match="redefines the operator `Neg`"):
        load_guarded(tmp_path / "model.onnx")


def test_a_fallback_for_an_operator_of_onnxruntime_is_not_read_because_it_is_not_run(tmp_path: Path) -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "abc"]
    node = helper.make_node("BiasGelu", ["a", "b"], ["c"], domain="com.microsoft")
    body = [helper.make_node("Sub", ["a", "b"], ["c"])]  # not what onnxruntime computes
    function = helper.make_function("com.microsoft", "BiasGelu", ["a", "b"], ["c"], body, [helper.make_opsetid("", 20)])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", ports[:2], ports[2:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[function]), path)
    assert not load_guarded(path).functions
    given = {"a": np.ones(4, np.float32), "b": np.zeros(4, np.float32)}
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert np.allclose(session.run(None, given)[0], 0.8413447)
    model = onnx.load(path)
    model.opset_import[1].version = 0  # then it does run the function
    onnx.save(model, path)
    with pytest.raises(MalformedInput, match="redefines the operator `BiasGelu`"):
        load_guarded(path)
