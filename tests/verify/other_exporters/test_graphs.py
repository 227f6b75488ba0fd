"""Graphs of other exporters: recognized by their inputs and outputs, compared, refused if their names are unknown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from onnx import numpy_helper

from benchmarks.exporters import GENAI, MOBIUS, OPTIMUM
from llmconv.cli import main
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.verify import PortMap, Report, register_port_map, verify_graphs
from llmconv.verify.other_exporters import port_map
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.mutants import MUTANTS, Mutant
from tests.builders.other_exporters import changed, export_by_transformers, renamed, transposed_cache
from tests.conftest import CONFIGS
from tools.other_exporters import FOLDER
from tools.other_exporters import exported as exported_by

Tiny = Callable[[str], Path]
OTHER_NAMES = renamed(r"^(past_key_values|present)\.(\d+)\.(k|v)\w+", r"\1_\2_\3")
FIELDS = {"past": "past_key_values_{layer}_{part}", "present": "present_{layer}_{part}", "parts": ["k", "v"]}


@pytest.fixture(scope="session")
def graph(exported: Tiny) -> Path:
    """The tiny llama's decode graph, which takes any number of tokens."""
    return exported("llama") / "decode.onnx"


@pytest.fixture
def check(exported: Tiny, eager: Callable[[str], Eager]) -> Callable[..., Report]:
    """`check(path, …)` compares a graph with the tiny llama."""
    return lambda *paths, **options: verify_graphs(paths, reference=exported("llama"), eager=eager("llama"), **options)


def weights(report: Report) -> str:
    """What the audit says."""
    return next(check.detail for check in report.checks if check.name == "weights")


def run(*arguments: object) -> Result:
    """The command's result."""
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


@pytest.mark.slow
def test_a_graph_is_recognized_by_its_inputs_and_compared_in_all_scenarios(
    graph: Path, check: Callable[..., Report]
) -> None:
    report = check(graph)
    assert report.verdict == "pass"
    assert {"left padding", "decode chain, 16 steps", "batch of 3, louder weights"} <= {c.name for c in report.checks}
    assert next(c.detail for c in report.checks if c.name == "structure") == "inputs and outputs named as by llmconv"


@pytest.mark.slow
def test_a_json_file_declares_other_names_and_axes(graph: Path, check: Callable[..., Report], tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        transposed_cache(model)
        OTHER_NAMES(model)

    odd = changed(graph, tmp_path / "odd.onnx", change)
    (tmp_path / "mine.json").write_text(json.dumps({**FIELDS, "axes": "bthd"}))
    assert check(odd, input_map=str(tmp_path / "mine.json")).verdict == "pass"


@pytest.mark.slow
def test_a_registered_row_is_found_by_auto(
    graph: Path, check: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_map, "_registered", {})
    odd = changed(graph, tmp_path / "odd.onnx", OTHER_NAMES)
    past, present = "past_key_values_{layer}_{part}", "present_{layer}_{part}"
    register_port_map(PortMap("odd", "an odd exporter", past=(past,), present=(present,), parts=("k", "v")))
    assert check(odd).verdict == "pass"


def test_unknown_names_are_refused_and_listed(graph: Path, check: Callable[..., Report], tmp_path: Path) -> None:
    odd = changed(graph, tmp_path / "odd.onnx", OTHER_NAMES)
    with pytest.raises(
        UnsupportedInput, match=r"does not fit any input map \(inputs `input_ids`, .*`past_key_values_0_k`"
    ):
        check(odd)


def test_a_map_that_does_not_fit_names_the_input(graph: Path, check: Callable[..., Report]) -> None:
    with pytest.raises(UnsupportedInput, match="the input map `transformers`: input `past_key_values.0.key`"):
        check(graph, input_map="transformers")


def test_a_mask_of_another_rank_is_refused(graph: Path, check: Callable[..., Report], tmp_path: Path) -> None:
    def widen(model: onnx.ModelProto) -> None:
        model.graph.input[1].type.tensor_type.shape.dim.add().dim_value = 1

    with pytest.raises(UnsupportedInput, match="input `attention_mask` with 3 axes"):
        check(changed(graph, tmp_path / "wide.onnx", widen), input_map="llmconv")


@pytest.mark.slow
def test_a_mutant_is_caught_and_located(check: Callable[..., Report], broken: Callable[[str, Mutant], Path]) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name.startswith("attention scale"))
    report = check(broken("llama", mutant) / "decode.onnx")
    assert report.verdict == "fail"
    assert report.where is not None and report.where.layer == 2


@pytest.mark.parametrize("fields", [{"axes": "bhdd"}, {"past": [1]}, {"nonsense": "x"}])
def test_a_json_file_that_is_not_an_input_map_is_refused(
    fields: dict[str, Any], graph: Path, check: Callable[..., Report], tmp_path: Path
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(fields))
    with pytest.raises(MalformedInput, match="`mine.json` is not an input map: "):
        check(graph, input_map=str(tmp_path / "mine.json"))


def test_an_input_map_with_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"axes": "bhtd", "axes": "bthd"}')
    with pytest.raises(MalformedInput, match="in `mine.json`: duplicate key `axes`"):
        port_map.find_port_maps(str(tmp_path / "mine.json"))


def test_renamed_transposed_and_packed_weights_are_found_by_content(
    graph: Path, check: Callable[..., Report], tmp_path: Path
) -> None:
    packed = changed(graph, tmp_path / "packed.onnx", pack_gate_and_up)
    report = check(packed)
    assert report.verdict == "pass"
    assert "1 in parts" in weights(report)
    assert any("louder weights" in found.name for found in report.checks)


def pack_gate_and_up(model: onnx.ModelProto) -> None:
    """Lays two projections of layer 1 side by side, as `MatMul` wants them."""
    nodes = {node.input[1]: node for node in model.graph.node if len(node.input) > 1}
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    found = [next(name for name in tensors if name.endswith(wanted.removeprefix("model."))) for wanted in names]
    values = [numpy_helper.to_array(tensors[name]).T for name in found]
    gate, up = (nodes[name] for name in found)
    at = list(model.graph.node).index(gate)
    shape = numpy_helper.from_array(np.array([values[0].shape[1]] * 2), "packed_sizes")
    model.graph.initializer.extend([numpy_helper.from_array(np.concatenate(values, axis=1), "packed"), shape])
    assert gate.input[0] == up.input[0], "both read the same"
    outputs = [gate.output[0], up.output[0]]
    product = onnx.helper.make_node("MatMul", [gate.input[0], "packed"], ["packed_product"])
    split = onnx.helper.make_node("Split", ["packed_product", "packed_sizes"], outputs, axis=-1)
    for node in (gate, up):
        model.graph.node.remove(node)
    for tensor in [tensors[name] for name in found]:
        model.graph.initializer.remove(tensor)
    model.graph.node.insert(at, product)
    model.graph.node.insert(at + 1, split)


@pytest.mark.slow
def test_other_content_under_a_tensors_name_is_a_failure(
    graph: Path, check: Callable[..., Report], tmp_path: Path
) -> None:
    def scale(model: onnx.ModelProto) -> None:
        tensor = next(
            tensor for tensor in model.graph.initializer if tensor.name.endswith("layers.2.mlp.up_proj.weight")
        )
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.0001), tensor.name))

    report = check(changed(graph, tmp_path / "scaled.onnx", scale))
    assert "layers.2.mlp.up_proj.weight` differs from the model's tensor of that name" in weights(report)
    assert report.verdict == "fail"


def test_a_layer_without_a_cache_is_a_failure(graph: Path, check: Callable[..., Report], tmp_path: Path) -> None:
    def forget(model: onnx.ModelProto) -> None:
        for port in [port for port in model.graph.output if port.name.startswith("present.3.")]:
            model.graph.output.remove(port)
        for port in [port for port in model.graph.input if port.name.startswith("past_key_values.3.")]:
            model.graph.input.remove(port)
            model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 2, 0, 16), np.float32), port.name))

    report = check(changed(graph, tmp_path / "short.onnx", forget))
    assert any("its past has 6 of 8 keys and values" in found.detail for found in report.checks)
    assert report.verdict == "fail"


@pytest.mark.slow
def test_fixed_batch_is_a_skip_and_not_a_failure(graph: Path, check: Callable[..., Report], tmp_path: Path) -> None:
    def fix(model: onnx.ModelProto) -> None:
        for port in model.graph.input:
            port.type.tensor_type.shape.dim[0].dim_value = 1

    report = check(changed(graph, tmp_path / "one.onnx", fix))
    skipped = {found.name: found.detail for found in report.checks if found.verdict == "skip"}
    assert skipped["batch of 3"] == "the graph has a batch size of 1, not 3"
    assert report.verdict == "pass"


def test_graphs_that_reach_outside_their_folder_are_refused(
    graph: Path, check: Callable[..., Report], tmp_path: Path
) -> None:
    model = onnx.load(graph, load_external_data=False)
    next(tensor for tensor in model.graph.initializer if tensor.external_data).external_data[0].value = "../secret"
    onnx.save(model, tmp_path / "hostile.onnx")
    with pytest.raises(MalformedInput, match="which is not a plain file name"):
        check(tmp_path / "hostile.onnx")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{folder}", "--graph", "{graph}"], "give either FOLDER or `--graph FILE`"),
        ([], "give either FOLDER or `--graph FILE`"),
        (["{folder}", "--input-map", "optimum"], "`--input-map` applies to `--graph` only"),
        (["--graph", "{graph}", "--input-map", "nobody"], "unknown input map `nobody`"),
        (["--graph", "{copy}"], "has no weights to compare `copy.onnx` with"),
        (["--graph", "{graph}", "--graph", "{graph}", "--graph", "{graph}"], "3 graphs were given"),
    ],
)
def test_contradicting_options_exit_2(arguments: list[str], said: str, graph: Path, tmp_path: Path) -> None:
    copy = changed(graph, tmp_path / "copy.onnx", lambda model: None)
    result = run(*(argument.format(folder=graph.parent, graph=graph, copy=copy) for argument in arguments))
    assert result.exit_code == 2
    assert said in result.stderr and "hint: " in result.stderr


def test_a_decode_graph_alone_is_refused(graph: Path, check: Callable[..., Report], tmp_path: Path) -> None:
    def fix(model: onnx.ModelProto) -> None:
        for port in model.graph.input[:1]:
            port.type.tensor_type.shape.dim[1].dim_value = 1

    with pytest.raises(UsageProblem, match="takes one token after a past, so it cannot run a prompt"):
        check(changed(graph, tmp_path / "step.onnx", fix))


@pytest.mark.slow
def test_the_command_takes_a_graph_instead_of_a_folder(graph: Path) -> None:
    result = run("--graph", graph, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["folder"] == "decode.onnx"


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_both_graphs_of_transformers_pass_alone_and_together(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    graphs = export_by_transformers(tiny(model_type), tmp_path / "by-transformers")
    report = verify_graphs(graphs, reference=tiny(model_type))
    assert report.verdict == "pass"
    assert {c.graph for c in report.checks if c.output} == {"prefill.onnx", "prefill.onnx+decode.onnx"}
    assert "transposed" in weights(report)
    mutant = changed(graphs[1], tmp_path / "mutant.onnx", one_less)
    assert verify_graphs([graphs[0], mutant], reference=tiny(model_type)).verdict == "fail"


def one_less(model: onnx.ModelProto) -> None:
    """Every position one less than it was told."""
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
    for node in model.graph.node:
        node.input[:] = ["moved" if name == "position_ids" else name for name in node.input]
    model.graph.node.insert(0, onnx.helper.make_node("Sub", ["position_ids", "one"], ["moved"]))


@pytest.mark.slow
@pytest.mark.parametrize("exporter", [OPTIMUM, GENAI, MOBIUS])
def test_a_llama_by_other_exporters_passes(exporter: str) -> None:
    graphs, problem = exported_by("llama", exporter)
    if not graphs:
        pytest.skip(problem)
    assert verify_graphs(graphs, reference=FOLDER / "llama").verdict == "pass"


@pytest.mark.slow
def test_tensors_of_one_content_are_each_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **CONFIGS["qwen3"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # its norms are all ones
    export(tmp_path, unified=True)
    report = verify_graphs([tmp_path / "model.onnx"], reference=tmp_path, scenario=["prefill, 7 tokens"])
    assert report.verdict == "pass", report.lines()
    assert not any("are in no graph" in note for note in report.notes)
