"""`--bisect` and `--minimize` on graphs of other exporters: the node is named after the module of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

from benchmarks.exporters import GENAI, MOBIUS, OPTIMUM, TRANSFORMERS
from llmconv.cli import main
from llmconv.verify import Report, verify_graphs
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.mutants import Mutant
from tests.builders.mutants.surgery import add_constant, constant_value, users
from tests.builders.other_exporters import changed, renamed, transposed_cache
from tests.verify.bisect.test_bisect import mutant_named
from tools.other_exporters import FOLDER
from tools.other_exporters import exported as exported_by

Tiny = Callable[[str], Path]
EPSILON = mutant_named("one norm's epsilon times ten")
PROMPT = ["prefill, 7 tokens", "left padding"]
OTHER_NAMES = renamed(r"^(past_key_values|present)\.(\d+)\.(k|v)\w+", r"\1_\2_\3")
FIELDS = {"past": "past_key_values_{layer}_{part}", "present": "present_{layer}_{part}", "parts": ["k", "v"]}


def finding(report: Report) -> str:
    """What is said in front of the call."""
    assert report.where
    return report.where.text.partition(" (")[0]


@pytest.fixture
def check(exported: Tiny, eager: Callable[[str], Eager]) -> Callable[..., Report]:
    """`check(path, …)` compares a graph with the tiny llama."""
    return lambda path, **options: verify_graphs([path], reference=exported("llama"), eager=eager("llama"), **options)


@pytest.mark.slow
def test_the_node_of_a_graph_under_other_names_and_axes_is_named(
    check: Callable[..., Report], broken: Callable[[str, Mutant], Path], tmp_path: Path
) -> None:
    def other(model: onnx.ModelProto) -> None:
        transposed_cache(model)
        OTHER_NAMES(model)

    graph = changed(broken("llama", EPSILON) / "decode.onnx", tmp_path / "other.onnx", other)
    fields = tmp_path / "map.json"
    fields.write_text(json.dumps({**FIELDS, "axes": "bthd"}))
    report = check(graph, input_map=str(fields), scenario=PROMPT, bisect=True)
    assert finding(report) == "layers.1.input_layernorm: epsilon 1e-05 in the graph, 1e-06 in the model"


@pytest.mark.slow
def test_the_node_of_a_later_step_is_named(check: Callable[..., Report], broken: Callable[[str, Mutant], Path]) -> None:
    graph = broken("llama", mutant_named("two pasts swapped")) / "decode.onnx"
    report = check(graph, scenario=["chunked prefill, every split of 9 tokens"], bisect=True)
    assert report.where and report.where.node and "the cache of layer" in report.where.finding


@pytest.mark.slow
def test_the_smallest_piece_of_an_external_graph_is_written(
    broken: Callable[[str, Mutant], Path], exported: Tiny, tmp_path: Path
) -> None:
    graph = broken("llama", EPSILON) / "decode.onnx"
    piece = tmp_path / "piece"
    arguments = ["--graph", graph, "--reference", exported("llama"), "--scenario", PROMPT[0], "--minimize", piece]
    result = CliRunner().invoke(main, ["verify", *map(str, arguments)])
    assert result.exit_code == 1
    assert {"piece.onnx", "inputs.npz", "expected.npz", "found.npz"} <= {path.name for path in piece.iterdir()}


def matrix_of_the_next_layer(model: onnx.ModelProto) -> None:
    """A product in the second of three layers reads the matrix of the same product in the third."""
    matrices = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2}
    products = [node for node in model.graph.node if node.op_type in {"MatMul", "Gemm"} and node.input[1] in matrices]
    per_layer = (len(products) - 1) // 3
    products[2 * per_layer - 2].input[1] = products[3 * per_layer - 2].input[1]


def epsilon_times_ten(model: onnx.ModelProto) -> None:
    """The second norm, whether it is one node or many."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon" and "Norm" in node.op_type and "Skip" in node.op_type + node.name:
                attribute.f *= 10
                return
    added = [node for node in users(model, "Add") if _is_epsilon(constant_value(model, node.input[1]))]
    epsilon = constant_value(model, added[1].input[1])
    assert epsilon is not None
    added[1].input[1] = add_constant(model, epsilon * 10)


def _is_epsilon(value: object) -> bool:
    return getattr(value, "size", 0) == 1 and 0 < float(getattr(value, "flat")[0]) < 1e-3  # noqa: B009 - numpy's own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (matrix_of_the_next_layer, "layers.1.mlp.up_proj: reads `model.layers.2.mlp.up_proj.weight`"),
        (epsilon_times_ten, "layers.0.post_attention_layernorm: epsilon 0.0001 in the graph, 1e-05 in the model"),
    ],
)
@pytest.mark.parametrize("exporter", [TRANSFORMERS, OPTIMUM, GENAI, MOBIUS])
def test_faults_in_graphs_of_real_exporters_are_named(
    exporter: str, change: Callable[[onnx.ModelProto], None], said: str, tmp_path: Path
) -> None:
    graphs, problem = exported_by("llama", exporter)
    if not graphs:
        pytest.skip(problem)
    graph = changed(graphs[0], tmp_path / "mutant" / graphs[0].name, change)
    only = ["prefill, 7 tokens", "prefill, 33 tokens"]
    report = verify_graphs([graph], reference=FOLDER / "llama", scenario=only, bisect=True)
    assert said in finding(report)
