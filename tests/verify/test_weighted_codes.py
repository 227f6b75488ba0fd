"""`verify` of 4 bits with `--calibrate`: values of columns that hardly count may be far beyond their block's codes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmconv.checkpoint import SINGLE, open_weights
from llmconv.export import export
from llmconv.tensors import Array
from llmconv.verify import verify
from llmconv.verify.results import Report
from tests.builders.safetensors import change_tensor
from tests.verify.test_quantized_folder import DOWN, FAULTS, damaged, replaced

GATE = "model.layers.1.mlp.gate_proj.weight"
FIRST = ("prefill, 7 tokens",)
EVERY = slice(None, None, 16)
"""Columns that count ten thousand times as much as the others."""


@pytest.fixture(scope="module")
def model(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose norms make a few channels loud, which its matrices multiply with small numbers."""
    folder = tmp_path_factory.mktemp("loud") / "llama"
    shutil.copytree(talking, folder)

    def scaled(values: Array, factor: float) -> Array:
        values[..., EVERY] *= factor
        return values

    for name, tensor in open_weights(folder).items():
        if len(tensor.shape) == 1:
            change_tensor(folder / SINGLE, name, partial(scaled, factor=100))
        elif "q_proj" in name or "gate_proj" in name:
            change_tensor(folder / SINGLE, name, partial(scaled, factor=0.05))
    return folder


@pytest.fixture(scope="module")
def four(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with 4 bits in blocks of 32, calibrated."""
    folder = tmp_path_factory.mktemp("weighted") / "out"
    export(model, folder, incremental=True, quant="int4", quant_block=32, method="search", calibrate="default")
    return folder


def failures(report: Report) -> str:
    return "; ".join(check.detail for check in report.checks if check.verdict == "fail" and check.name == "weights")


@pytest.mark.slow
def test_columns_that_hardly_count_may_be_cut_off(model: Path, four: Path) -> None:
    stored, original = load_file(four / "quantized.safetensors"), open_weights(model)[GATE].read()
    scales = np.repeat(stored[GATE + ".scales"], 32, axis=1)[:, : original.shape[1]]
    assert (np.abs(original / scales) > 20).any()  # more than 4 bits hold
    report = verify(four, reference=model, scenario=FIRST)
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_quantizer_is_named(fault: str, model: Path, four: Path, tmp_path: Path) -> None:
    suffix, edit = FAULTS[fault]
    broken = damaged(four, tmp_path / "broken", DOWN + suffix, edit)
    assert DOWN in failures(verify(broken, reference=model, scenario=FIRST))


@pytest.mark.slow
def test_a_block_of_extreme_codes_is_named(model: Path, four: Path, tmp_path: Path) -> None:
    """Its scale is so small that every code is the nearest."""
    stored, original = load_file(four / "quantized.safetensors"), open_weights(model)[DOWN].read()
    codes, scales, zeros = (stored[DOWN + suffix].copy() for suffix in (".codes", ".scales", ".zeros"))
    scales[3, 0] *= 1e-6
    zeros[3, 0] = (zeros[3, 0] & 0xF0) | 8
    nearest = np.where(original[3, :32] > 0, 15, 0).astype(np.uint8)
    codes[3, 0] = nearest[0::2] | nearest[1::2] << 4
    broken = damaged(four, tmp_path / "scales", DOWN + ".scales", partial(replaced, other=scales))
    for number, (suffix, values) in enumerate(((".zeros", zeros), (".codes", codes))):
        broken = damaged(broken, tmp_path / str(number), DOWN + suffix, partial(replaced, other=values))
    assert "all values of row 3, columns 0 to 31, are beyond the codes" in failures(
        verify(broken, reference=model, scenario=FIRST)
    )
