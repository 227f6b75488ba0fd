"""`verify` of graphs with integer keys and values: a right one passes, and a wrong scale or rounding is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from llmconv.checkpoint import SINGLE
from llmconv.errors import UsageProblem
from llmconv.export import export
from llmconv.tensors import Array
from llmconv.verify import Report, verify
from tests.builders.safetensors import change_tensor

FIRST_KEY, FIRST_VALUE, SECOND_KEY = (
    "past_key_values.0.key.scale",
    "past_key_values.0.value.scale",
    "past_key_values.1.key.scale",
)
Scales = dict[str, Array]


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("Once there was a clever robot named Bolt. Bolt sailed an iron ship over the cold sea. " * 20)
    return path


@pytest.fixture(scope="module")
def coded(talking_as: Callable[[str], Path], prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded") / "out"
    export(talking_as("llama"), folder, unified=True, kv_cache="int8", calibrate=prose)
    return folder


def damaged(folder: Path, target: Path, edit: Callable[[onnx.ModelProto], None]) -> Path:
    """A copy with a changed graph, and no checksums."""
    shutil.copytree(folder, target)
    model = onnx.load(target / "model.onnx", load_external_data=False)
    edit(model)
    onnx.save(model, target / "model.onnx")
    manifest = json.loads((target / "llmconv.json").read_text())
    (target / "llmconv.json").write_text(json.dumps({**manifest, "files": {}}))
    return target


def with_scales(edit: Callable[[Scales], None]) -> Callable[[onnx.ModelProto], None]:
    """Changes the scales of a graph, given by name."""

    def change(model: onnx.ModelProto) -> None:
        tensors = {one.name: one for one in model.graph.initializer if one.name.endswith(".scale")}
        scales = {name: numpy_helper.to_array(tensor).copy() for name, tensor in tensors.items()}
        edit(scales)
        for name, tensor in tensors.items():
            tensor.CopyFrom(numpy_helper.from_array(scales[name], name))

    return change


def keys_and_values_exchanged(scales: Scales) -> None:
    scales[FIRST_KEY], scales[FIRST_VALUE] = scales[FIRST_VALUE], scales[FIRST_KEY]


def of_another_layer(scales: Scales) -> None:
    scales[FIRST_KEY] = scales[SECOND_KEY]


def of_the_next_channel(scales: Scales) -> None:
    scales[FIRST_VALUE] = np.roll(scales[FIRST_VALUE], 1, axis=-1)


def of_the_other_head(scales: Scales) -> None:
    scales[FIRST_VALUE] = scales[FIRST_VALUE][:, ::-1].copy()


def a_percent_more(scales: Scales) -> None:
    scales[SECOND_KEY] = scales[SECOND_KEY] * np.float32(1.01)


WRONG_SCALES = [
    keys_and_values_exchanged,
    of_another_layer,
    of_the_next_channel,
    of_the_other_head,
    a_percent_more,
]


def checked(folder: Path, model: Path, prose: Path) -> Report:
    return verify(folder, reference=model, calibrate=prose, scenario=["left padding"])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_right_graph_passes_and_its_cost_is_small(
    model_type: str, talking_as: Callable[[str], Path], prose: Path, tmp_path: Path
) -> None:
    export(talking_as(model_type), tmp_path / "out", kv_cache="int8", calibrate=prose)
    report = verify(tmp_path / "out", reference=talking_as(model_type), calibrate=prose)
    assert report.verdict == "pass", report.summary()
    assert {check.name for check in report.checks} >= {"cache codes", "cache scales"}
    assert report.quantization is not None and report.quantization.cost is not None
    assert 0 < report.quantization.cost.divergence["mean"] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG_SCALES)
def test_a_wrong_scale_fails(
    fault: Callable[[Scales], None], coded: Path, talking_as: Callable[[str], Path], prose: Path, tmp_path: Path
) -> None:
    folder = damaged(coded, tmp_path / "out", with_scales(fault))
    report = checked(folder, talking_as("llama"), prose)
    assert report.verdict == "fail"
    assert {check.name for check in report.checks if check.verdict == "fail"} == {"cache scales"}


@pytest.mark.slow
def test_scales_that_a_graph_reads_in_the_wrong_order_fail(
    coded: Path, talking_as: Callable[[str], Path], prose: Path, tmp_path: Path
) -> None:
    def exchange(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
        node.input[12], node.input[13] = node.input[13], node.input[12]

    report = checked(damaged(coded, tmp_path / "out", exchange), talking_as("llama"), prose)
    assert report.verdict == "fail"


def test_one_scale_for_all_channels_is_refused(
    coded: Path, talking_as: Callable[[str], Path], prose: Path, tmp_path: Path
) -> None:
    def per_tensor(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
        next(one for one in node.attribute if one.name == "k_quant_type").s = b"PER_TENSOR"

    report = checked(damaged(coded, tmp_path / "out", per_tensor), talking_as("llama"), prose)
    assert report.verdict == "fail" and "k_quant_type" in report.checks[0].detail


@pytest.mark.slow
def test_quantized_weights_and_cache_are_compared_together(
    talking_as: Callable[[str], Path], prose: Path, tmp_path: Path
) -> None:
    model = talking_as("llama")
    export(model, tmp_path / "out", quant="int4", kv_cache="int8", calibrate=prose, incremental=True)
    report = verify(tmp_path / "out", reference=talking_as("llama"), calibrate=prose)
    assert report.verdict == "pass", report.summary()
    folder = tmp_path / "out"
    graph = onnx.load(folder / "decode.onnx", load_external_data=False)
    with_scales(of_another_layer)(graph)
    onnx.save(graph, folder / "decode.onnx")
    assert verify(folder, reference=talking_as("llama"), calibrate=prose, allow_changed=True).verdict == "fail"


def test_the_text_of_the_export_is_needed(coded: Path, talking_as: Callable[[str], Path]) -> None:
    with pytest.raises(UsageProblem, match="the text of the export"):
        verify(coded, reference=talking_as("llama"))


def test_another_text_is_refused(coded: Path, talking_as: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Another text. " * 100)
    with pytest.raises(UsageProblem, match="is not the text"):
        verify(coded, reference=talking_as("llama"), calibrate=tmp_path / "other.txt")


def test_a_text_has_no_use_for_a_cache_of_floats(talking_as: Callable[[str], Path], prose: Path) -> None:
    with pytest.raises(UsageProblem, match="applies to graphs of `export --kv-cache int8`"):
        verify(talking_as("llama"), calibrate=prose)


@pytest.fixture(scope="module")
def choosing(talking_as: Callable[[str], Path], prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choosing") / "out"
    model, cache = talking_as("llama"), "int8"
    export(model, folder, quant="int8", kv_cache=cache, calibrate=prose, unified=True, postprocess="topk:3")
    return folder


@pytest.mark.slow
def test_the_codes_behind_chosen_tokens_are_compared(
    choosing: Path, talking_as: Callable[[str], Path], prose: Path
) -> None:
    report = verify(choosing, reference=talking_as("llama"), scenario=["prefill, 7 tokens"], calibrate=prose)
    assert report.verdict == "pass", report.lines()
    assert {"tokens", "scores"} <= {check.output for check in report.checks}
    assert {"cache codes", "cache scales", "cost of quantization"} <= {check.name for check in report.checks}


def test_a_wrong_scale_behind_chosen_tokens_fails(
    choosing: Path, talking_as: Callable[[str], Path], prose: Path, tmp_path: Path
) -> None:
    folder = damaged(choosing, tmp_path / "broken", with_scales(of_another_layer))
    report = verify(folder, reference=talking_as("llama"), scenario=["prefill, 7 tokens"], calibrate=prose)
    assert "cache scales" in {check.name for check in report.checks if check.verdict == "fail"}


@pytest.mark.slow
def test_values_and_logits_of_zeros_pass(talking_as: Callable[[str], Path], prose: Path, tmp_path: Path) -> None:
    shutil.copytree(talking_as("llama"), model := tmp_path / "model")
    for name in ("model.layers.1.self_attn.v_proj.weight", "lm_head.weight"):
        change_tensor(model / SINGLE, name, np.zeros_like)
    export(model, tmp_path / "out", unified=True, kv_cache="int8", calibrate=prose)
    report = verify(tmp_path / "out", reference=model, calibrate=prose, scenario=["prefill, 7 tokens"])
    assert report.verdict == "pass", report.closing_lines()
