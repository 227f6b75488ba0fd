"""`export --quant a8w8`: int8 weights per output, activations rounded at run time; verify finds faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from llmconv.errors import UsageProblem
from llmconv.export import export
from llmconv.tensors import Array
from llmconv.verify import verify
from llmconv.verify.other_exporters.quantized.accuracy import GATES, AccuracyGate
from tests.verify.test_quantized_folder import damaged
from tools.tiny_models import depth, save_tiny

UP = "model.layers.1.mlp.up_proj.weight"
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gemma2", "mixtral", "bloom", "phi3")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """`made(model_type)` is a tiny model and its folder of a8w8 graphs."""
    known: dict[str, tuple[Path, Path]] = {}

    def folders(model_type: str) -> tuple[Path, Path]:
        if model_type not in known:
            home = tmp_path_factory.mktemp(model_type)
            save_tiny(model_type, home / "model", depth(model_type))
            export(home / "model", home / "out", incremental=True, quant="a8w8")
            known[model_type] = home / "model", home / "out"
        return known[model_type]

    return folders


def operators(folder: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(folder / "decode.onnx", load_external_data=False).graph.node)


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", *OTHERS])
def test_verify_accepts_it(model_type: str, made: Callable[[str], tuple[Path, Path]]) -> None:
    model, folder = made(model_type)
    report = verify(folder, reference=model)
    assert report.verdict == "pass", report.closing_lines()
    assert operators(folder)["DynamicQuantizeMatMul"]


def test_the_head_and_the_last_projections_of_mlps_are_blocks(made: Callable[[str], tuple[Path, Path]]) -> None:
    found = operators(made("llama")[1])
    assert found["MatMulNBits"] == depth("llama") + 1 and found["DynamicQuantizeMatMul"] == 6 * depth("llama")


def of_the_next_output(values: Array) -> Array:
    return np.roll(values, 1, axis=-1)


def of_the_next_input(values: Array) -> Array:
    return np.roll(values, 1, axis=0)


def one_code_changed(codes: Array) -> Array:
    codes[7, 3] += 1 if codes[7, 3] < 0 else -1
    return codes


FAULTS = {
    "scales of the next output": (".scales", of_the_next_output),
    "codes of the next output": (".codes", of_the_next_output),
    "codes of the next input": (".codes", of_the_next_input),
    "one wrong code": (".codes", one_code_changed),
}


@pytest.mark.quick_rows("codes of the next input")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    model, folder = made("llama")
    suffix, edit = FAULTS[fault]
    report = verify(
        damaged(folder, tmp_path / "broken", UP + suffix, edit), reference=model, scenario=["prefill, 7 tokens"]
    )
    assert any("up_proj.weight" in check.detail for check in report.checks if check.verdict == "fail")


@pytest.mark.slow
def test_a_wrong_zero_point_is_found(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    model, folder = made("llama")
    broken = damaged(folder, tmp_path / "broken", UP + ".scales", lambda scales: scales)
    graph = onnx.load(broken / "decode.onnx", load_external_data=False)
    node = next(node for node in graph.graph.node if node.op_type == "DynamicQuantizeMatMul")
    count = load_file(folder / "quantized.safetensors")[node.input[2]].size
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(count, np.int8), "zero"))
    node.input.append("zero")
    onnx.save(graph, broken / "decode.onnx")
    report = verify(broken, reference=model, scenario=["prefill, 7 tokens"], allow_changed=True)
    assert any(check.name == "weights" for check in report.checks if check.verdict == "fail")


@pytest.mark.slow
def test_a_loss_above_the_limit_of_the_preset_fails(
    talking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(talking, tmp_path / "out", incremental=True, quant="a8w8")
    monkeypatch.setitem(GATES, "a8w8", AccuracyGate(1e-9))
    report = verify(tmp_path / "out", reference=talking, scenario=["prefill, 7 tokens"])
    assert [check.name for check in report.checks if check.verdict == "fail"] == ["cost of quantization"]


def test_half_precision_is_refused(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="`--quant a8w8` computes in float32"):
        export(made("llama")[0], tmp_path / "out", quant="a8w8", precision="float16")


@pytest.mark.slow
def test_two_exports_are_equal(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    model, folder = made("llama")
    export(model, tmp_path / "again", incremental=True, quant="a8w8")
    again = (tmp_path / "again" / "quantized.safetensors").read_bytes()
    assert again == (folder / "quantized.safetensors").read_bytes()
