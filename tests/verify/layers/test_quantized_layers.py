"""Folders with quantized weights by induction: clean ones pass, every mutant fails and is placed in its layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from llmconv.export import export
from llmconv.verify import Report, quantized_folder, verify
from tests.builders.mutants.quantized_folders import FOLDER_MUTANTS, FolderMutant
from tools.tiny_models import depth, save_tiny

FAMILIES = ("llama", "gpt2", "gemma2", "qwen3")
PRESETS: dict[str, dict[str, Any]] = {
    "int4": {"quant": "int4", "quant_block": 16},
    "int8": {"quant": "int8"},
    "a8w8": {"quant": "a8w8"},
    "int4-mixed": {"quant": "int4-mixed"},
    "float16": {"quant": "int4", "quant_block": 16, "precision": "float16"},
    "bfloat16": {"quant": "int4", "quant_block": 16, "precision": "bfloat16"},
    "symmetric": {"quant": "int4", "quant_block": 16, "symmetric": True},
    "ort-cpu": {"quant": "int4", "quant_block": 16, "target": "ort-cpu"},
}
Made = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made(model_type, preset)` is a model of five layers at least, and a folder of its decode graph."""
    found: dict[tuple[str, str], tuple[Path, Path]] = {}

    def folders(model_type: str, preset: str = "int4") -> tuple[Path, Path]:
        if (model_type, preset) not in found:
            folder = tmp_path_factory.mktemp(model_type)
            save_tiny(model_type, folder / "model", depth(model_type))
            export(folder / "model", folder / "out", prefill=False, incremental=True, **PRESETS[preset])
            found[model_type, preset] = folder / "model", folder / "out"
        return found[model_type, preset]

    return folders


def by_induction(folder: Path, model: Path, **options: Any) -> Report:
    given: dict[str, Any] = {"scenario": ("prefill, 7 tokens",), "allow_changed": True, "record": False}
    return verify(folder, reference=model, method="induction", **{**given, **options})


def changed_layers(folder: Path, other: Path) -> set[int | None]:
    """The layers in which tensors or nodes of two folders differ; None for what is outside of all layers."""
    names = set[str]()
    for path in folder.glob("quantized*.safetensors"):
        mine, theirs = load_file(path), load_file(other / path.name)
        names |= {name for name in mine if not np.array_equal(mine[name], theirs[name])}
    one, two = (onnx.load(place / "decode.onnx", load_external_data=False).graph for place in (folder, other))
    known = {node.SerializeToString() for node in one.node} | {port.SerializeToString() for port in one.initializer}
    names |= {item.name for item in (*two.node, *two.initializer) if item.SerializeToString() not in known}
    found = [re.search(r"(?:^|\.)(\d+)\.", name) for name in names]
    return {int(match[1]) if match else None for match in found}


@pytest.mark.one_row_in(3)
@pytest.mark.quick_rows("int4", "a8w8")
@pytest.mark.parametrize("preset", PRESETS)
def test_a_clean_folder_passes(preset: str, made: Made) -> None:
    model, folder = made("llama", preset)
    report = by_induction(folder, model, scenario=())
    assert report.verdict == "pass" and report.method == "induction", report.lines()
    assert len(report.statements) == 5 and all(one.shown for one in report.statements)
    assert report.quantization and report.quantization.cost


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "preset"), [*((name, "int4") for name in FAMILIES), ("llama", "ort-cpu"), ("gpt2", "ort-cpu")]
)
@pytest.mark.parametrize("mutant", FOLDER_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fails_in_its_layer(
    mutant: FolderMutant, model_type: str, preset: str, made: Made, tmp_path: Path
) -> None:
    model, folder = made(model_type, preset)
    if not mutant.apply(folder, tmp_path / "mutant"):
        pytest.skip("no place for it in this family")
    report = by_induction(tmp_path / "mutant", model)
    assert report.verdict == "fail"
    layers = changed_layers(folder, tmp_path / "mutant")
    layers |= {0} if None in layers else set()  # the first layer shows what is wrong before it
    assert report.where and report.where.layer in layers, report.lines()


def test_codes_that_are_read_under_another_name_fail(made: Made, tmp_path: Path) -> None:
    """Both matrices are the model's, each in the place of the other."""
    model, folder = made("llama")
    exchanged = next(one for one in FOLDER_MUTANTS if one.name == "two products read each other's codes")
    assert exchanged.apply(folder, tmp_path / "mutant")
    assert by_induction(tmp_path / "mutant", model, layers="classes").verdict == "fail"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"precision": "bfloat16"}, {"target": "ort-cpu"}], ids=["bfloat16", "ort-cpu"])
def test_graphs_of_floats_pass(options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    """onnxruntime's CPU provider has no bfloat16 kernels; norms that add read two values of the layer before."""
    model, _ = made("llama")
    export(model, tmp_path / "out", prefill=False, incremental=True, **options)
    report = by_induction(tmp_path / "out", model)
    assert report.verdict == "pass" and report.method == "induction", report.lines()


def test_a_scale_beyond_all_products_is_a_failure(made: Made, tmp_path: Path) -> None:
    """The error of such a code is infinite, or no number."""
    model, folder = made("llama", "a8w8")

    def overflow(tensors: dict[str, np.ndarray]) -> bool:
        name = next(name for name in sorted(tensors) if name.endswith("2.self_attn.q_proj.weight.scales"))
        tensors[name].ravel()[3] = 3e38
        return True

    assert FolderMutant("an overflowing scale", overflow).apply(folder, tmp_path / "mutant")
    assert by_induction(tmp_path / "mutant", model).verdict == "fail"


def test_structure_sees_scales_of_another_matrix_and_codes_of_another_type(made: Made, tmp_path: Path) -> None:
    model, folder = made("llama")

    def exchanged(graph: onnx.ModelProto) -> bool:
        for node in graph.graph.node:  # in all layers, so that they stay alike
            if node.op_type == "MatMulNBits" and ".o_proj." in node.input[1]:
                node.input[2] = node.input[2].replace("self_attn.o_proj", "mlp.down_proj")
        return True

    def other_type(graph: onnx.ModelProto) -> bool:
        codes = next(tensor for tensor in graph.graph.initializer if tensor.name.endswith(".codes"))
        codes.data_type = onnx.TensorProto.INT8
        return True

    for name, change in (("scales", exchanged), ("type", other_type)):
        assert FolderMutant(name, graph=change).apply(folder, tmp_path / name)
        report = verify(tmp_path / name, reference=model, method="structure", allow_changed=True, record=False)
        assert any(check.name == "weights" and check.verdict == "fail" for check in report.checks), report.lines()


def test_what_a_large_model_leaves_out_is_reported(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("LARGE", 0), ("ROUNDED_AGAIN", 0), ("COST_WORK", 1.0)):
        monkeypatch.setattr(quantized_folder, name, limit)
    model, folder = made("llama")
    report = by_induction(folder, model)
    assert report.verdict == "pass" and quantized_folder.UNSEARCHED in report.unseen
    assert report.quantization and report.quantization.cost
    assert report.quantization.cost.tokens == quantized_folder.LEAST_TOKENS
    wrong = next(one for one in FOLDER_MUTANTS if one.name == "scales of the next block")
    assert wrong.apply(folder, tmp_path / "mutant")
    assert by_induction(tmp_path / "mutant", model).verdict == "fail"
