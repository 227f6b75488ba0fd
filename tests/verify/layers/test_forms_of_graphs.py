"""Graphs in stages, with fixed buffers, and that choose tokens, by induction: what passes, and which faults fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from llmconv.errors import MalformedInput
from llmconv.export.exporter import export
from llmconv.verify import verify
from llmconv.verify.float_folder import odd_ports
from llmconv.verify.layers.graph_layers import forms_of
from llmconv.verify.layers.layer_checks import NAME
from tests.builders.layered_models import save_layered

QUICK = ("prefill, 7 tokens", "second turn")
SECOND = "model-2-of-2.onnx"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of four layers in two stages; do not write into it."""
    return save_layered("llama", tmp_path_factory.mktemp("staged") / "model", stages=2)


def node_of(model: onnx.ModelProto, operator: str, *, reads: str = "") -> onnx.NodeProto:
    found: onnx.NodeProto = next(n for n in model.graph.node if n.op_type == operator and reads in ["", *n.input])
    return found


def hides_the_token_itself(model: onnx.ModelProto) -> None:
    node_of(model, "LessOrEqual").op_type = "Less"


def counts_texts_in_place_of_tokens(model: onnx.ModelProto) -> None:
    length = next(
        n for n in model.graph.node if n.op_type == "Shape" and {a.name: a.i for a in n.attribute}.get("start")
    )
    for attribute in length.attribute:
        attribute.i -= 1


def shifts_positions(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.int64), "one more"))
    unsqueezed = node_of(model, "Unsqueeze", reads="position_ids")
    model.graph.node.insert(0, onnx.helper.make_node("Add", ["position_ids", "one more"], ["later"], name="later"))
    next(n for n in model.graph.node if n.name == unsqueezed.name).input[0] = "later"


def doubles_the_hidden_state(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.input[:] = ["doubled" if name == "hidden_states.2" else name for name in node.input]
    added = onnx.helper.make_node("Add", ["hidden_states.2", "hidden_states.2"], ["doubled"], name="doubled")
    model.graph.node.insert(0, added)


def takes_half_precision(model: onnx.ModelProto) -> None:
    port = next(port for port in model.graph.input if port.name == "hidden_states.2")
    port.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def returns_the_other_layers_cache(model: onnx.ModelProto) -> None:
    names = {"present.2.key": "present.3.key", "present.3.key": "present.2.key"}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def takes_seven_tokens(model: onnx.ModelProto) -> None:
    port = next(port for port in model.graph.input if port.name == "hidden_states.2")
    port.type.tensor_type.shape.dim[1].dim_value = 7


def has_a_constant_twice(model: onnx.ModelProto) -> None:
    """The wrong one of two is found under either name."""
    constant = next(t for t in model.graph.initializer if t.name == "constant")
    right = onnx.numpy_helper.to_array(constant)
    constant.CopyFrom(onnx.numpy_helper.from_array(right * np.float32(1.05), "constant"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(right, "constant:2"))


MUTANTS: list[Callable[[onnx.ModelProto], None]] = [
    hides_the_token_itself,
    counts_texts_in_place_of_tokens,
    shifts_positions,
    doubles_the_hidden_state,
    takes_half_precision,
    takes_seven_tokens,
    has_a_constant_twice,
    returns_the_other_layers_cache,
]


@pytest.mark.one_row_in(2)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.__name__))
@pytest.mark.parametrize("low_memory", [pytest.param(True, marks=pytest.mark.slow), None], ids=["in pieces", "whole"])
def test_a_fault_of_one_stage_is_found(
    mutant: Callable[[onnx.ModelProto], None], low_memory: bool | None, staged: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(staged, tmp_path / "copy")
    model = onnx.load(folder / SECOND, load_external_data=False)
    mutant(model)
    onnx.save(model, folder / SECOND)
    options: dict[str, Any] = {"allow_changed": True, "record": False, "scenario": QUICK, "low_memory": low_memory}
    report = verify(folder, reference=staged, method="induction", **options)
    assert report.verdict == "fail", report.lines()


def test_stages_are_shown_by_induction_under_their_name(staged: Path) -> None:
    report = verify(staged, method="induction", scenario=QUICK, record=False)
    assert (report.method, report.verdict) == ("induction", "pass"), report.lines()
    assert {check.graph for check in report.checks if check.is_measured} == {"model-*-of-2.onnx"}
    assert all(statement.shown for statement in report.statements)


def test_stages_in_another_order_fail(staged: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(staged, tmp_path / "copy")
    manifest = json.loads((folder / "llmconv.json").read_text())
    manifest["graphs"]["unified"]["stages"].reverse()
    (folder / "llmconv.json").write_text(json.dumps(manifest))
    report = verify(folder, reference=staged, method="induction", scenario=QUICK, record=False)
    assert report.verdict == "fail", report.lines()


def test_a_value_that_changes_its_type_between_stages_is_named(staged: Path) -> None:
    stages = {name: onnx.load(staged / name, load_external_data=False) for name in ("model-1-of-2.onnx", SECOND)}
    assert odd_ports(stages) == {}
    port = next(port for port in stages[SECOND].graph.input if port.name == "hidden_states.2")
    port.type.tensor_type.shape.dim[2].dim_value = 8
    assert odd_ports(stages) == {SECOND: "it takes `hidden_states.2` in another type than the stage before"}


def test_graphs_of_one_name_are_refused(staged: Path, tmp_path: Path) -> None:
    """Of two entries under one name, one alone would be looked at."""
    folder = tmp_path / "out"
    export(staged, folder, prefill=True, incremental=True, stages=2)
    manifest = json.loads((folder / "llmconv.json").read_text())
    manifest["graphs"]["prefill"]["stages"][0]["file"] = "decode-1-of-2.onnx"
    (folder / "llmconv.json").write_text(json.dumps(manifest))
    with pytest.raises(MalformedInput, match="two graphs of the manifest are named"):
        verify(folder, reference=staged, record=False)


def test_codes_in_stages_that_declare_a_shared_input_differently_fail(staged: Path, tmp_path: Path) -> None:
    """One text alone runs in the first stage, and the cost is measured on one at a time."""
    export(staged, tmp_path / "out", prefill=False, incremental=True, stages=2, quant="int8")
    path = tmp_path / "out/decode-1-of-2.onnx"
    model = onnx.load(path, load_external_data=False)
    mask = next(port for port in model.graph.input if port.name == "attention_mask")
    mask.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, path)
    given: dict[str, Any] = {"allow_changed": True, "record": False, "scenario": QUICK}
    report = verify(tmp_path / "out", reference=staged, method="induction", **given)
    failed = {check.detail for check in report.checks if check.verdict == "fail"}
    assert failed == {"it takes `attention_mask` in another type than the stage before"}


def test_a_layer_that_calls_an_overload_is_a_class_of_its_own() -> None:
    node = onnx.helper.make_node("F", ["x"], ["y"], domain="own")
    other = onnx.helper.make_node("F", ["x"], ["y"], domain="own", overload="b")
    assert forms_of([node], str)[1] != forms_of([other], str)[1]


BUFFERED: dict[str, dict[str, Any]] = {
    "shared buffers": {"cache": "shared-buffer"},
    "shared buffers for onnxruntime": {"cache": "shared-buffer", "target": "ort-cpu"},
    "static": {"shapes": "static", "max_seq_len": 64},
}


def changes_the_attention(model: onnx.ModelProto, layer: int) -> None:
    (node,) = (
        n for n in model.graph.node if n.op_type in ("Attention", "GroupQueryAttention") and f".{layer}." in n.name
    )
    if node.op_type == "GroupQueryAttention":
        next(a for a in node.attribute if a.name == "scale").f *= 1.1
        return
    node.attribute.append(onnx.helper.make_attribute("softcap", 0.5))


@pytest.mark.quick_rows("shared buffers for onnxruntime")
@pytest.mark.parametrize("options", BUFFERED)
def test_a_fault_of_a_layer_with_fixed_buffers_is_seen_in_that_layer_alone(options: str, tmp_path: Path) -> None:
    source = save_layered("llama", tmp_path / "model")
    export(source, tmp_path / "out", prefill=True, incremental=True, **BUFFERED[options])
    for name in ("prefill.onnx", "decode.onnx"):
        model = onnx.load(tmp_path / "out" / name, load_external_data=False)
        changes_the_attention(model, 2)
        onnx.save(model, tmp_path / "out" / name)
    given: dict[str, Any] = {"allow_changed": True, "record": False, "scenario": QUICK}
    report = verify(tmp_path / "out", reference=source, method="induction", **given)
    failed = {check.output for check in report.checks if check.name == NAME and check.verdict == "fail"}
    assert failed == {"hidden state after layer 2"}, report.lines()


def test_a_graph_without_room_for_the_call_of_single_layers_is_run_whole(tmp_path: Path) -> None:
    source = save_layered("llama", tmp_path / "model")
    export(source, tmp_path / "out", prefill=False, incremental=True, shapes="static", max_seq_len=3)
    report = verify(tmp_path / "out", reference=source, method="induction", record=False)
    assert report.method == "whole" and not any(check.verdict == "fail" for check in report.checks), report.lines()
    assert any("the graph's cache has room for 3 tokens, not 4" in note for note in report.notes), report.notes


OPTIONS: dict[str, dict[str, Any]] = {
    **BUFFERED,
    "static batch": {"shapes": "static", "max_seq_len": 64, "batch_size": 2},
    "codes in shared buffers": {"cache": "shared-buffer", "target": "ort-cpu", "quant": "int4"},
    "half precision in shared buffers": {"cache": "shared-buffer", "precision": "float16"},
    "static codes and tokens": {"shapes": "static", "max_seq_len": 64, "quant": "int8", "postprocess": "argmax"},
    "tokens": {"postprocess": "argmax"},
    "likeliest tokens of the last position": {"postprocess": "topk:3", "last_logits": True},
    "tokens of three stages": {"postprocess": "argmax", "stages": 3},
    "codes in stages": {"quant": "int4", "stages": 2},
    "half precision in stages": {"precision": "float16", "stages": 2},
    "bfloat16 in stages": {"precision": "bfloat16", "stages": 2},
    "tokens of codes": {"quant": "int4", "postprocess": "argmax"},
    "stages for onnxruntime": {"target": "ort-cpu", "stages": 2},
}


STATES = ("mamba", "lfm2")  # which no fixed buffer holds
KINDS = ("llama", "gpt2", "gemma3_text", *STATES)
ROWS = [
    (kind, name)
    for kind in KINDS
    for name, options in OPTIONS.items()
    if kind not in STATES or not {"cache", "shapes"} & options.keys()
]


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("low_memory", [True, None], ids=["in pieces", "whole"])
@pytest.mark.parametrize(("kind", "options"), ROWS)
def test_every_kind_is_shown_by_induction(kind: str, options: str, low_memory: bool | None, tmp_path: Path) -> None:
    source = save_layered(kind, tmp_path / "model")
    export(source, tmp_path / "out", prefill=True, incremental=True, **OPTIONS[options])
    report = verify(tmp_path / "out", reference=source, method="induction", low_memory=low_memory, record=False)
    assert (report.method, report.verdict) == ("induction", "pass"), (report.notes, report.lines())
