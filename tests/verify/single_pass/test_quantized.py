"""Graphs without a cache whose weights are codes are compared with the model of the same codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file

from llmconv.export import export
from llmconv.files.safetensors_file import read_header
from llmconv.verify import verify
from tests.builders.embedding_models import save_model, save_modules
from tests.builders.quantized_models import FOLDER
from tests.builders.tracing import trace_once

trace_once()

GPTQ = FOLDER / "gptq_4bit_sym"
OPTIONS = {"scoring": {"no_cache": True}, "embed": {"task": "embed"}, "classify": {"task": "classify"}}


def model_of(role: str, base: Path, folder: Path) -> Path:
    """A quantized model of a task: with pooling, or with a head of classes in place of that of tokens."""
    shutil.copytree(base, folder)
    if role == "embed":
        return save_modules(folder)
    if role == "classify":
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3, "pad_token_id": 0}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        head = torch.randn(3, config["hidden_size"], generator=torch.Generator().manual_seed(0))
        kept = {name: one for name, one in tensors.items() if not name.startswith("lm_head.")}
        save_file({**kept, "score.weight": head.half()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "role", ["embed", *(pytest.param(role, marks=pytest.mark.slow) for role in ("scoring", "classify"))]
)
@pytest.mark.parametrize(
    "base", ["gptq_4bit_sym", *(pytest.param(one, marks=pytest.mark.slow) for one in ("awq_gemm", "modelopt_fp8"))]
)
def test_codes_are_audited_and_every_output_is_that_of_the_codes(role: str, base: str, tmp_path: Path) -> None:
    folder = model_of(role, FOLDER / base, tmp_path / "model")
    export(folder, tmp_path / "made", **OPTIONS[role])  # type: ignore[arg-type]
    report = verify(tmp_path / "made", reference=folder)
    assert report.verdict == "pass" and not [check for check in report.checks if check.verdict != "pass"]
    assert {check.name for check in report.checks} >= {"weights", "one token", "padding on the left"}
    assert report.quantization and len(report.quantization.weights) >= 7


@pytest.mark.parametrize("preset", ["int4", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int8", "a8w8"))])
def test_an_export_makes_codes_for_a_task(preset: str, tmp_path: Path) -> None:
    folder = save_modules(save_model(tmp_path / "model", "qwen3"))
    export(folder, tmp_path / "made", task="embed", quant=preset)
    report = verify(tmp_path / "made", reference=folder)
    assert report.verdict == "pass" and report.quantization and report.quantization.weights


def change_norm(folder: Path) -> None:
    """The epsilon of a norm is another number."""
    path = next(folder.glob("*.onnx"))
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        for one in node.attribute:
            if one.name == "epsilon":
                one.f *= 64
                return onnx.save(model, path)
    for node in model.graph.node:
        value = next((one.t for one in node.attribute if one.name == "value"), None)
        if value is not None and not value.dims and 0 < numpy_helper.to_array(value) < 1e-3:
            value.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(value) * np.float32(64)))
            return onnx.save(model, path)
    raise AssertionError("the graph has no epsilon")


def change_scale(folder: Path) -> None:
    """A scale is an eighth larger."""
    path = next(folder.glob("quantized*.safetensors"))
    tensor = next(one for name, one in read_header(path).tensors.items() if name.endswith(".scales"))
    scales = tensor.read()
    scales.flat[0] *= scales.dtype.type(1.125)
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(scales.tobytes())


@pytest.mark.parametrize("change", [change_scale, pytest.param(change_norm, marks=pytest.mark.slow)])
def test_a_fault_is_found(change: Callable[[Path], None], tmp_path: Path) -> None:
    export(GPTQ, tmp_path / "made", no_cache=True)
    change(tmp_path / "made")
    report = verify(tmp_path / "made", reference=GPTQ, allow_changed=True)
    assert report.verdict == "fail"


@pytest.mark.slow
def test_another_pooling_fails(tmp_path: Path) -> None:
    folder = model_of("embed", GPTQ, tmp_path / "model")
    export(folder, tmp_path / "made", task="embed")
    save_modules(folder, "mean")
    failed = {check.output for check in verify(tmp_path / "made", reference=folder).checks if check.verdict == "fail"}
    assert failed == {"sentence_embedding"}
