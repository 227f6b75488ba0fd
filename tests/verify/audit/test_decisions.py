"""The audit of decisions names a graph that is wrong at one length, position, batch or token only, without a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from transformers import configuration_utils

from llmconv.export import export
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.packed_cache import WEIGHTS_FOLDER
from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array
from llmconv.verify import Check, verify, verify_graphs
from llmconv.verify.audit.decisions import ConfigNumbers, audit_decisions, odd_row, read_config
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.hidden_triggers import HIDDEN
from tests.builders.mutants.laundered_triggers import LAUNDERED
from tests.builders.mutants.mutants import ALL
from tests.builders.mutants.surgery import add_constant, constant_value, users
from tests.builders.mutants.trigger_nodes import Nodes, Trigger
from tests.builders.mutants.triggers_by_surgery import TRIGGERS
from tests.builders.prefix_models import save_adapter
from tests.builders.slow_rows import slow_but
from tests.conftest import save_tiny
from tests.verify.conftest import decode_only

Tiny = Callable[[str], Path]
ORIGINAL = "original_max_position_embeddings"
EVERY = (*TRIGGERS, *HIDDEN, *LAUNDERED)
BY_NAME = {trigger.name: trigger for trigger in EVERY}


def audit(folder: Path, name: str = "decode.onnx") -> Check:
    """The audit of one graph of a folder."""
    return audit_decisions(name, load_guarded(folder / name), read_config(folder))


def test_a_config_is_read_without_deprecated_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "torch_dtype": "float32"}))
    messages: list[str] = []
    monkeypatch.setattr(configuration_utils.logger, "warning_once", messages.append)
    assert "vocab_size" in read_config(tmp_path)["stated"]
    assert not messages


@pytest.fixture
def triggered(exported: Tiny, tmp_path: Path) -> Callable[[Trigger], Path]:
    """`triggered(trigger)` is the tiny llama with that trigger in its decode graph."""

    def folder(trigger: Trigger) -> Path:
        target = decode_only(exported("llama"), tmp_path / "triggered")
        model = onnx.load(target / "decode.onnx", load_external_data=False)
        trigger.apply(Nodes(model))
        onnx.save(model, target / "decode.onnx")
        return target

    return folder


@pytest.mark.slow_rows("position equal")
@pytest.mark.parametrize("trigger", EVERY, ids=lambda trigger: trigger.name)
def test_every_trigger_is_named(trigger: Trigger, triggered: Callable[[Trigger], Path]) -> None:
    check = audit(triggered(trigger))
    assert check.verdict == "fail"
    assert "`model.layers." in check.detail or "`pair/" in check.detail


@cache
def clean_logits(folder: Path) -> Array:
    """Of a call of three sequences, one padded."""
    return logits(folder)


def logits(folder: Path) -> Array:
    """The same of a folder with another graph."""
    ids = np.arange(3 * 5).reshape(3, 5) + 3
    mask = np.ones_like(ids)
    mask[0, :2] = 0
    options = ort.SessionOptions()
    options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    options.log_severity_level = 4
    model = (folder / "decode.onnx").read_bytes()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    past = {
        port.name: np.zeros([3, port.shape[1], 0, port.shape[3]], np.float32)
        for port in session.get_inputs()
        if port.name.startswith("past")
    }
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": default_positions(mask, 5), **past}
    found: Array = session.run(["logits"], given)[0]
    return found


@pytest.mark.slow_rows(
    "position equal",
    "position above",
    "new length equal",
    "inside an if",
    "by a range",
    "by a token table",
    "subtracted in an if",
    "a quotient of the batch",
    "rows by a remainder",
    "small tables",
    "the value of a cosine",
)
@pytest.mark.parametrize("trigger", EVERY, ids=lambda trigger: trigger.name)
def test_a_trigger_changes_nothing_in_an_ordinary_call(
    trigger: Trigger, triggered: Callable[[Trigger], Path], exported: Tiny
) -> None:
    np.testing.assert_allclose(logits(triggered(trigger)), clean_logits(exported("llama")), rtol=0, atol=1e-5)


def test_the_detail_names_the_node_the_decision_and_the_number(triggered: Callable[[Trigger], Path]) -> None:
    detail = audit(triggered(BY_NAME["batch equal"])).detail
    assert detail.startswith("`model.layers.0/Equal_") and detail.endswith("` decides on batch size by 77")


@pytest.mark.slow
def test_a_graph_that_only_the_audit_finds_fails(
    triggered: Callable[[Trigger], Path], exported: Tiny, eager: Callable[[str], Eager]
) -> None:
    folder = triggered(BY_NAME["position equal"])
    report = verify(folder, reference=exported("llama"), eager=eager("llama"))
    failed = {(check.name, check.graph) for check in report.checks if check.verdict == "fail"}
    assert failed == {("decisions", "decode.onnx")}
    assert report.where and "decides on position by 3817" in report.where.text


@pytest.mark.parametrize("model_type", slow_but(ALL, "llama"))
def test_a_correct_export_decides_by_numbers_of_the_model(model_type: str, exported: Tiny) -> None:
    check = audit(exported(model_type))
    assert check.verdict == "pass", check.detail
    assert "by numbers of the model (0" in check.detail


OPTIONS: tuple[dict[str, Any], ...] = (
    {"last_logits": True},
    {"postprocess": "topk:3"},
    {"stages": 2},
    {"opset": 21},
    {"cache": "shared-buffer"},
    {"cache": "shared-buffer", "target": "ort-cpu"},
    {"shapes": "static", "batch_size": 2, "max_seq_len": 48, "prompt_len": 8},
    {"prefix": "PrefixTuning"},
    {"layout": "optimum"},
    {"layout": "transformersjs"},
)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_correct_export_with_options_decides_by_numbers_of_the_model(
    options: dict[str, Any], model_type: str, optioned: Callable[..., Path]
) -> None:
    folder = optioned(model_type, **options)
    for path in folder.glob("*.onnx"):
        check = audit(folder, path.name)
        assert check.verdict == "pass", check.detail


def audit_all(folder: Path) -> None:
    """Passes where the audit of every graph of a folder does."""
    checks = [audit(folder, path.name) for path in folder.glob("*.onnx")]
    assert checks and all(check.verdict == "pass" for check in checks), [check.detail for check in checks]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_that_are_cast_to_float32_are_not_changed(dtype: str, tiny: Tiny, tmp_path: Path) -> None:
    export(tiny("gpt2"), tmp_path / "half", incremental=True, dtype=dtype)
    audit_all(tmp_path / "half")


@pytest.mark.slow
def test_a_stage_without_sliding_layers_needs_no_window(optioned: Callable[..., Path]) -> None:
    folder = optioned("gemma2", stages=4)
    assert len(list(folder.glob("decode-*.onnx"))) == 4
    audit_all(folder)


@pytest.mark.slow
def test_the_graph_for_optimum_has_its_window(optioned: Callable[..., Path]) -> None:
    audit_all(optioned("gemma2", layout="optimum"))


def test_the_length_of_a_prefix_is_a_number_of_the_model(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    keys = save_adapter(folder, tmp_path / "adapter", "PrefixTuning", num_virtual_tokens=90)
    export(folder, prefill=True, prefix=keys)
    audit_all(folder)


SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8, ORIGINAL: 80},
    {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 80},
)


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_rotary_frequencies_may_depend_on_the_length(scaling: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_theta": 10000.0, **scaling}
    save_tiny("llama", tmp_path / "model", rope_parameters=rope, max_position_embeddings=320)
    export(tmp_path / "model", incremental=True)
    audit_all(tmp_path / "model")


def test_a_half_precision_graph_may_round_a_limit() -> None:
    rounded = float(np.float16(0.001))
    assert not ConfigNumbers.of({"time_step_min": 0.001}).bounds_data(rounded)
    assert ConfigNumbers.of({"time_step_min": 0.001}, half="float16").bounds_data(rounded)


def test_scores_of_experts_may_be_compared_with_twice_the_jitter() -> None:
    assert ConfigNumbers.of({"router_jitter_noise": 0.013}).bounds_data(0.026)
    assert not ConfigNumbers.of({"input_jitter_noise": 0.013}).bounds_data(0.026)


@pytest.mark.slow
def test_a_window_of_another_size_is_not_a_number_of_the_model(exported: Tiny, tmp_path: Path) -> None:
    folder = decode_only(exported("gemma2"), tmp_path / "window")
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    window = json.loads((folder / "config.json").read_text())["sliding_window"]
    edge = next(node for node in users(model, "Sub") if constant_value(model, node.input[1]) == np.int64(window))
    edge.input[1] = add_constant(model, np.int64(window + 300))
    onnx.save(model, folder / "decode.onnx")
    assert f"decides on length and place in the sequence by {window + 300}" in audit(folder).detail


@pytest.mark.slow
def test_a_missing_window_is_named(exported: Tiny, tmp_path: Path) -> None:
    folder = decode_only(exported("gemma2"), tmp_path / "dropped")
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    everything = add_constant(model, np.array(True))
    edge = users(model, "Greater")[0].output[0]
    for node in users(model, "And"):
        node.input[:] = [everything if name == edge else name for name in node.input]
    model.graph.node.remove(users(model, "Greater")[0])
    onnx.save(model, folder / "decode.onnx")
    window = json.loads((folder / "config.json").read_text())["sliding_window"]
    assert audit(folder).detail == f"no node decides by the sliding window of {window}"


def rotary_product(folder: Path, target: Path) -> Path:
    """The llama with the rotary angles from a matrix product."""
    folder = decode_only(folder, target)
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    angles = next(node for node in users(model, "Mul") if node.name.startswith("model.rotary_emb"))
    table = constant_value(model, angles.input[1])
    assert table is not None
    angles.op_type = "MatMul"
    angles.input[1] = add_constant(model, table[None, None])
    onnx.save(model, folder / "decode.onnx")
    return folder


@pytest.mark.slow
def test_angles_from_an_outer_product_decide_nothing(exported: Tiny, tmp_path: Path) -> None:
    folder = rotary_product(exported("llama"), tmp_path / "outer")
    assert verify(folder, scenario="left padding", allow_changed=True, record=False).verdict == "pass"


@pytest.mark.slow
def test_a_default_of_transformers_is_a_number_of_the_model(exported: Tiny, tmp_path: Path) -> None:
    """Older configs lack fields; what the model then has is what its class says."""
    folder = decode_only(exported("gpt2"), tmp_path / "bare")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert read_config(folder)["default"]["n_positions"] == 1024 != fields["n_positions"]


def test_a_graph_that_cannot_be_analyzed_fails(exported: Tiny) -> None:
    model = load_guarded(exported("llama") / "decode.onnx")
    users(model, "Concat")[0].ClearField("attribute")
    model.graph.node.append(onnx.helper.make_node("Add", ["logits"], ["nothing"]))
    check = audit_decisions("decode.onnx", model, {})
    assert check.verdict == "fail" and "cannot be analyzed" in check.detail


def foreign(folder: Path, reference: Path, eager: Eager) -> tuple[list[Check], list[str]]:
    """Failed decisions and notes of a graph that is judged as another exporter's."""
    report = verify_graphs([folder / "decode.onnx"], reference=reference, eager=eager, scenario=["prefill, 3 tokens"])
    return [check for check in report.checks if check.name == "decisions"], report.notes


@pytest.mark.quick_rows("position equal-True")
@pytest.mark.parametrize(("name", "fails"), [("position equal", True), ("total length above", False)])
def test_in_another_exporter_s_graph_a_single_number_fails_and_a_limit_is_a_note(
    name: str, fails: bool, triggered: Callable[[Trigger], Path], exported: Tiny, eager: Callable[[str], Eager]
) -> None:
    checks, notes = foreign(triggered(BY_NAME[name]), exported("llama"), eager("llama"))
    assert [check.verdict for check in checks] == (["fail"] if fails else [])
    assert fails or any("decides on length by 5000, which is not in the config" in note for note in notes)


def test_a_correct_graph_of_another_exporter_has_no_note(exported: Tiny, eager: Callable[[str], Eager]) -> None:
    checks, notes = foreign(exported("llama"), exported("llama"), eager("llama"))
    assert checks == [] and not any("decides" in note for note in notes)


ROWS = np.arange(300, dtype=np.float32)


@pytest.mark.parametrize(
    "table",
    [
        np.ones(300, np.float32),
        ROWS * 3 - 7,
        np.cos(ROWS[:, None] * np.array([1, 0.1, 1e-4], np.float32)) * 1.19,
        np.tril(np.ones((300, 300), bool)),
        np.tril(np.triu(np.ones((300, 300), bool), -40)),
    ],
    ids=["one value", "a line", "a rotary table", "a causal mask", "a window"],
)
def test_a_regular_table_has_no_odd_row(table: Array) -> None:
    assert odd_row(table) is None
    changed = table.copy()
    changed[217, ...] = ~changed[217, ...] if table.dtype == bool else changed[217, ...] * 1.1 + 0.01
    assert odd_row(changed) in (217, 218)


@pytest.mark.slow
def test_the_reference_of_a_changed_folder_is_its_own_config(exported: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported("gemma2"), tmp_path / "copy"))
    assert audit(folder).verdict == "pass"
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "sliding_window": 400}))
    assert audit(folder).verdict == "fail"


def test_the_config_of_custom_code_is_used_unchanged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "its_own", "its_window": 77}))
    assert read_config(tmp_path) == {"stated": {"model_type": "its_own", "its_window": 77}, "default": {}}
