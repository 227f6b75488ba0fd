"""The tables of kernels, and the nodes that have none."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from llmconv.export.export_options import TARGETS
from llmconv.export.graph_files import report, widen_without_kernels
from llmconv.export.targets.kernels import Fallback, fallbacks, kernel_table
from tools.target_tables import cpu_table

HALF, FULL, BRAIN = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BFLOAT16


def graph(nodes: list[onnx.NodeProto], dtype: int, names: str = "x", opset: int = 23) -> onnx.ModelProto:
    """A graph of nodes whose inputs have one element type."""
    inputs = [helper.make_tensor_value_info(name, dtype, None) for name in names]
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.UNDEFINED, None)]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", inputs, outputs), opset_imports=opsets)


def attention(dtype: int) -> onnx.ModelProto:
    return graph([helper.make_node("Attention", list("qkv"), ["y"], "attend")], dtype, "qkv")


def test_the_table_of_the_cpu_is_that_of_the_installed_onnxruntime() -> None:
    table = kernel_table("ort-cpu")
    if table["onnxruntime"] != onnxruntime.__version__:
        pytest.skip(f"the table is that of onnxruntime {table['onnxruntime']}")
    assert table == cpu_table()


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_table_names_its_source_and_release(target: str) -> None:
    table = kernel_table(target)
    assert table["source"] and table["onnxruntime"] and table["kernels"]["MatMul"]


def test_directml_has_no_attention() -> None:
    assert fallbacks(attention(FULL), "ort-dml") == [Fallback("Attention", ("float32",), 1, "attend")]


@pytest.mark.parametrize("dtype", [FULL, HALF, BRAIN])
def test_cuda_has_attention_in_every_precision(dtype: int) -> None:
    assert fallbacks(attention(dtype), "ort-cuda") == []


@pytest.mark.parametrize(("target", "dtype"), [("ort-webgpu", BRAIN), ("ort-dml", BRAIN)])
def test_a_product_in_bfloat16_has_no_kernel_outside_of_cuda(target: str, dtype: int) -> None:
    model = graph([helper.make_node("MatMul", ["x", "x"], ["y"])], dtype)
    assert [one.types for one in fallbacks(model, target)] == [("bfloat16",)]
    assert fallbacks(model, "ort-cuda") == []


def test_grouped_query_attention_of_cuda_takes_half_precision_only() -> None:
    lengths = [helper.make_node("Cast", ["n"], ["m"], to=TensorProto.INT32)]
    query = helper.make_node("GroupQueryAttention", ["q", "k", "v", "a", "b", "m", "m"], ["y"], domain="com.microsoft")
    models = {dtype: graph([*lengths, query], dtype, "qkvabn") for dtype in (FULL, HALF)}
    assert [one.operator for one in fallbacks(models[FULL], "ort-cuda")] == ["com.microsoft:GroupQueryAttention"]
    assert fallbacks(models[HALF], "ort-cuda") == []


@pytest.mark.parametrize(("target", "row"), TARGETS.items())
def test_presets_use_grouped_query_attention_only_where_a_kernel_takes_the_precision(target: str, row: object) -> None:
    kernels = kernel_table(target)["kernels"].get("com.microsoft:GroupQueryAttention", [])
    types = {name for *_, constraints in kernels for name in constraints["T"].split()}
    assert set(TARGETS[target].grouped_query) <= types


def test_an_open_range_of_versions_does_not_count_for_later_versions() -> None:
    cosine = [helper.make_node("Cos", ["x"], ["y"])]
    assert fallbacks(graph(cosine, FULL, opset=21), "ort-webgpu") == []
    assert [one.operator for one in fallbacks(graph(cosine, FULL, opset=23), "ort-webgpu")] == ["Cos"]


def test_computations_on_integers_do_not_count() -> None:
    model = graph([helper.make_node("Mod", ["x", "x"], ["y"])], TensorProto.INT64)
    assert fallbacks(model, "ort-webgpu") == []


def test_types_are_followed_through_casts_and_operators_of_onnxruntime() -> None:
    narrow = helper.make_node("Cast", ["x"], ["h"], to=BRAIN)
    norm = helper.make_node("SkipSimplifiedLayerNormalization", ["h", "h", "h"], ["n"], domain="com.microsoft")
    model = graph([narrow, norm, helper.make_node("Erf", ["n"], ["y"])], FULL)
    assert {one.operator: one.types for one in fallbacks(model, "ort-dml")}["Erf"] == ("bfloat16",)


def test_nodes_of_functions_and_of_inner_graphs_count() -> None:
    inner = helper.make_graph([helper.make_node("Attention", list("qkv"), ["z"], "inner")], "then", [], [])
    inner.output.append(helper.make_tensor_value_info("z", HALF, None))
    choice = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    model = graph([helper.make_node("Cast", ["q"], ["c"], to=TensorProto.BOOL), choice], HALF, "qkv")
    assert ("Attention", 2) in [(one.operator, one.count) for one in fallbacks(model, "ort-dml")]


@pytest.mark.parametrize(("count", "words"), [(1, "1 node of x.onnx runs"), (2, "2 nodes of x.onnx run")])
def test_the_warning_has_nouns_in_the_right_number(count: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    report({"x.onnx": [Fallback("Attention", ("float32",), count, "attend")]}, "ort-dml", strict=False)
    assert f"{words} on the CPU, such as `attend`" in capsys.readouterr().err


@pytest.mark.parametrize(("op_type", "casts"), [("Greater", 2), ("ReduceMax", 2), ("Add", 0)])
def test_bfloat16_without_a_kernel_anywhere_is_computed_in_float32(op_type: str, casts: int) -> None:
    """onnxruntime 1.31 with CUDA does not open a graph with such a node (seen with `Greater` of Mamba 2)."""
    names = "x" if op_type == "ReduceMax" else "xy"
    model = ir.from_proto(graph([helper.make_node(op_type, list(names), ["z"], "compute")], BRAIN, names))
    widen_without_kernels(model)
    made = ir.to_proto(model)
    assert fallbacks(made, "ort-cuda") == []
    assert len([node for node in made.graph.node if node.op_type == "Cast"]) == casts
    assert made.graph.output[0].name == "z"
