"""Faults that passed once: each is a small graph surgery, or a way to ask, of which a verdict of 0 would be wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from llmconv.export.exporter import export
from llmconv.files.safe_folder import require_writable
from llmconv.runtime.onnxruntime.guard import external_fields
from llmconv.verify import Report, verify
from llmconv.verify.audit.decisions import audit_decisions, read_config
from llmconv.verify.reference.eager import Eager
from llmconv.verify.report.files import NAMES, write_report
from llmconv.verify.scenarios.calls import ModelFacts
from llmconv.verify.scenarios.table import SCENARIOS, Scenario
from tests.builders.mutants.mutants import clips_dropped
from tests.builders.mutants.surgery import initializer, replace_input
from tests.builders.mutants.trigger_nodes import Nodes
from tests.builders.mutants.weights import Surgery
from tests.conftest import save_tiny
from tests.verify.conftest import decode_only

Tiny = Callable[[str], Path]
Make = Callable[[Nodes], None]


def scenario(name: str) -> Scenario:
    """The row of that name."""
    return next(row for row in SCENARIOS if row.name == name)


def faulty(folder: Path, target: Path, change: Surgery) -> Path:
    """A copy with the decode graph alone, changed."""
    decode_only(folder, target)
    model = onnx.load(target / "decode.onnx", load_external_data=False)
    change(model, target)
    onnx.save(model, target / "decode.onnx")
    return target


def details(report: Report, name: str) -> str:
    """What the failed checks of one name say."""
    return "; ".join(check.detail for check in report.checks if check.name == name and check.verdict == "fail")


def more_rows_than_tokens(graph: Nodes) -> None:
    graph.scale_hidden(graph.loud(graph.make("Greater", graph.batch(), graph.total_length())))


def context_is_full(graph: Nodes) -> None:
    graph.scale_hidden(graph.loud(graph.make("Equal", graph.total_length(), 128)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name"),
    [(more_rows_than_tokens, "one-token prompt"), (context_is_full, "pasts of 30 to 1,022 tokens")],
)
def test_a_decision_by_a_number_of_the_model_is_crossed_by_a_quick_scenario(
    make: Make, name: str, exported: Tiny, eager: Callable[[str], Eager], tmp_path: Path
) -> None:
    def change(model: onnx.ModelProto, folder: Path) -> bool:
        make(Nodes(model))
        return True

    folder = faulty(exported("llama"), tmp_path / "faulty", change)
    report = verify(folder, scenario=[name], eager=eager("llama"))
    assert {check.name for check in report.checks if check.verdict == "fail"} == {name}


def at_random(graph: Nodes) -> None:
    noise = graph.make("RandomUniform", shape=[1])
    graph.scale_hidden(graph.make("Add", graph.make("Relu", graph.make("Sub", noise, 0.999)), 1.0))


def dropped_at_random(graph: Nodes) -> None:
    share, trains = graph.constant(np.float32(1e-4)), graph.constant(np.array(True))
    kept = graph.make("Dropout", np.ones(1, np.float32), share, trains)
    graph.scale_hidden(graph.make("Mul", kept, 1 - 1e-4))


def clipped_by_the_base_of_the_rotary_angles(graph: Nodes) -> None:
    graph.scale_hidden(graph.constant(np.float32(1)))
    product = next(node for node in graph.model.graph.node if node.name == "model.layers.0/Mul_900")
    name, product.output[0] = product.output[0], "unclipped"
    clip = helper.make_node("Clip", ["unclipped", "", graph.constant(np.float32(10000))], [name], name="clip")
    graph.model.graph.node.insert(list(graph.model.graph.node).index(product) + 1, clip)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (at_random, "RandomUniform gives different results in each run"),
        (dropped_at_random, "Dropout gives different results in each run"),
        (clipped_by_the_base_of_the_rotary_angles, "compares model values with 10000"),
    ],
)
def test_the_audit_of_decisions_names(make: Make, said: str, exported: Tiny) -> None:
    model = onnx.load(exported("llama") / "decode.onnx", load_external_data=False)
    make(Nodes(model))
    assert said in audit_decisions("decode.onnx", model, read_config(exported("llama"))).detail


def test_the_tokens_at_both_ends_and_that_of_padding_are_run() -> None:
    chains = scenario("first and last token").build(ModelFacts(1000, padding=500))
    assert {int(token) for chain in chains for token in chain[0].input_ids.ravel()} == {0, 1, 499, 500, 501, 998, 999}


def test_two_rows_lie_on_both_sides_of_the_original_context() -> None:
    chains = scenario("beyond the original context").build(ModelFacts(50, 300, original=40))
    assert any(call.position_ids[-1].max() < 40 < call.position_ids[0].min() for chain in chains for call in chain)


def without_positions(model: onnx.ModelProto, folder: Path) -> bool:
    """Positions are counted by the mask; the input is gone."""
    graph = Nodes(model)
    counted = graph.make("Sub", graph.make("CumSum", "attention_mask", 1), 1)
    last = graph.make("Neg", graph.new_length())
    new = graph.make("Slice", counted, last, np.array([1 << 62]), np.array([1]))
    for node in model.graph.node:
        replace_input(node, "position_ids", new)
    model.graph.input.remove(next(port for port in model.graph.input if port.name == "position_ids"))
    return True


def test_a_graph_without_the_position_ids_that_the_model_takes_fails(
    exported: Tiny, eager: Callable[[str], Eager], tmp_path: Path
) -> None:
    folder = faulty(exported("llama"), tmp_path / "faulty", without_positions)
    report = verify(folder, scenario=["prefill, 7 tokens"], eager=eager("llama"))
    assert details(report, "structure") == "missing input: position_ids"


def embedding_elsewhere(model: onnx.ModelProto, folder: Path) -> bool:
    """A row is another in a copy of the embedding, which has a name and a file of its own."""
    mapped = initializer(model, "model.embed_tokens.weight")
    assert mapped is not None
    fields = external_fields(mapped)
    raw = (folder / fields["location"]).read_bytes()[int(fields["offset"]) :][: int(fields["length"])]
    (folder / "rows.bin").write_bytes(raw[:-4] + b"\0\0\0\0")
    copy = onnx.TensorProto.FromString(mapped.SerializeToString())
    copy.name = "rows"
    del copy.external_data[:]
    for key, value in (("location", "rows.bin"), ("offset", "0"), ("length", str(len(raw)))):
        copy.external_data.add(key=key, value=value)
    model.graph.initializer.append(copy)
    for node in model.graph.node:
        replace_input(node, mapped.name, "rows")
    return True


def test_weights_of_another_name_in_another_file_are_not_tensors_of_the_model(
    exported: Tiny, eager: Callable[[str], Eager], tmp_path: Path
) -> None:
    folder = faulty(exported("llama"), tmp_path / "faulty", embedding_elsewhere)
    report = verify(folder, scenario=["prefill, 1 token"], eager=eager("llama"))
    assert "`rows` maps `rows.bin`" in details(report, "weights")


@pytest.mark.slow
def test_an_older_report_is_removed_when_a_run_begins(clean_report: Report, tmp_path: Path) -> None:
    write_report(clean_report, tmp_path)
    require_writable(tmp_path, NAMES)
    assert not [name for name in NAMES if (tmp_path / name).exists()]


@pytest.mark.slow
def test_the_summary_shows_that_only_some_scenarios_were_selected(
    exported: Tiny, eager: Callable[[str], Eager]
) -> None:
    report = verify(exported("llama"), scenario=["prefill, 1 token"], eager=eager("llama"))
    assert report.summary().endswith("; could not have found: faults that only other scenarios show")


@pytest.mark.slow
def test_a_reused_reference_runs_all_scaled_weights_again(tmp_path: Path) -> None:
    folder = save_tiny("gemma2", tmp_path / "gemma2", num_hidden_layers=2)
    export(folder, unified=True)
    reference = Eager(folder, "float32", keep=True)
    names = [{check.name for check in verify(folder, eager=reference).checks} for _ in range(2)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_dropped_limit_is_detected_in_the_second_folder_of_one_reference(tmp_path: Path) -> None:
    folder = save_tiny("gpt_oss", tmp_path / "gpt_oss", **_SMALL_EXPERTS)
    export(folder, unified=True)
    reference = Eager(folder, "float32", keep=True)
    assert verify(folder, eager=reference)
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    model = onnx.load(broken / "model.onnx", load_external_data=False)
    assert clips_dropped()(model, broken)
    onnx.save(model, broken / "model.onnx")
    report = verify(broken, eager=reference, allow_changed=True)
    assert any("weights x" in check.name for check in report.checks if check.verdict == "fail")


_SMALL_EXPERTS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.slow
def test_a_reused_reference_takes_the_dtype_of_the_graphs(exported: Tiny, tmp_path: Path) -> None:
    folder = faulty(exported("llama"), tmp_path / "faulty", scale_of_attention_a_thousandth_more)
    report = verify(folder, scenario=["prefill, 7 tokens"], eager=Eager(exported("llama"), "bfloat16"))
    assert report.verdict == "fail"


def scale_of_attention_a_thousandth_more(model: onnx.ModelProto, folder: Path) -> bool:
    """Far inside of bfloat16's noise, far outside of float32's."""
    scaled = [one for node in model.graph.node for one in node.attribute if one.name == "scale"]
    for attribute in scaled:
        attribute.f *= 1.001
    return bool(scaled)


def neighbors_alike(graph: Nodes, axis: int) -> str:
    """Tokens that equal their neighbor along an axis, as int64."""
    ends, axes = np.array([1 << 62]), np.array([axis])
    ahead = graph.make("Slice", "input_ids", np.array([1]), ends, axes)
    before = graph.make("Slice", "input_ids", np.array([0]), np.array([-1]), axes)
    return graph.make("Cast", graph.make("Equal", ahead, before), to=onnx.TensorProto.INT64)


def a_token_twice_in_a_row(graph: Nodes) -> None:
    count = graph.make("ReduceSum", neighbors_alike(graph, 1), keepdims=0)
    graph.scale_hidden(graph.loud(graph.make("Greater", count, 0)))


def rows_all_alike(graph: Nodes) -> None:
    least = graph.make("ReduceMin", neighbors_alike(graph, 0), keepdims=0)
    graph.scale_hidden(graph.loud(graph.make("Greater", least, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [a_token_twice_in_a_row, rows_all_alike])
def test_text_that_repeats_itself_and_beams_of_one_prompt_are_run(
    make: Make, exported: Tiny, eager: Callable[[str], Eager], tmp_path: Path
) -> None:
    def change(model: onnx.ModelProto, folder: Path) -> bool:
        make(Nodes(model))
        return True

    folder = faulty(exported("llama"), tmp_path / "faulty", change)
    report = verify(folder, scenario=["equal rows of repeated tokens"], eager=eager("llama"))
    assert {check.output for check in report.checks if check.verdict == "fail"} >= {"logits", "present.0.key"}
