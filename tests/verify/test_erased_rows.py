"""`verify` of rows whose scale is so coarse that each code, although the nearest, is the zero point; and of zeros."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmconv.checkpoint import SINGLE
from llmconv.export import export
from llmconv.tensors import Array
from llmconv.verify import Report, verify
from tests.builders.safetensors import change_tensor
from tests.builders.slow_rows import slow_but
from tests.verify.test_quantized_folder import damaged, replaced

UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
ROW = 3
FIRST = ["prefill, 7 tokens"]
PRESETS: dict[str, dict[str, Any]] = {
    "int8": {"quant": "int8"},
    "int4": {"quant": "int4"},
    "int4, symmetric": {"quant": "int4", "symmetric": True},
    "int4, rtn": {"quant": "int4", "method": "rtn"},
    "int4-small": {"quant": "int4-small", "quant_block": 32},
    "int4, calibrated": {"quant": "int4", "calibrate": "default"},
    "a8w8": {"quant": "a8w8"},
}


def erased(tensors: dict[str, Array], name: str, original: Array) -> dict[str, Array]:
    """Codes and scales with one output of a matrix at its zero points, of a scale twice its largest weight or more."""
    codes, scales = tensors[name + ".codes"].copy(), tensors[name + ".scales"].copy()
    if codes.dtype == np.int8:
        codes[:, ROW], scales[ROW] = 0, 2.2 * np.abs(original[ROW]).max()
    else:
        scales[ROW] = 2.2 * np.abs(original[ROW]).max()
        zeros = tensors.get(name + ".zeros")
        is_eight = codes.shape[-1] * codes.shape[-2] >= original.shape[1]
        points = np.full(codes.shape[1], 128 if is_eight else 8, np.uint8)
        if zeros is not None:
            points = np.stack([zeros[ROW] & 15, zeros[ROW] >> 4], axis=-1).ravel()[: codes.shape[1]]
        codes[ROW] = (points if is_eight else points | points << 4)[:, None]
    return {name + ".codes": codes, name + ".scales": scales}


def weights(report: Report) -> str:
    return "; ".join(check.detail for check in report.checks if check.verdict == "fail" and check.name == "weights")


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_row_of_zero_points_is_named(preset: str, talking: Path, tmp_path: Path) -> None:
    export(talking, clean := tmp_path / "out", incremental=True, **PRESETS[preset])
    assert weights(verify(clean, reference=talking, scenario=FIRST)) == ""
    stored, original = load_file(clean / "quantized.safetensors"), load_file(talking / SINGLE)[UP]
    broken = clean
    for name, values in erased(stored, UP, original).items():
        broken = damaged(broken, tmp_path / name, name, partial(replaced, other=values))
    assert f"`{UP}`" in (found := weights(verify(broken, reference=talking, scenario=FIRST))) and "scale of" in found


def scaled(values: Array, factor: float) -> Array:
    return values * np.float32(factor)


def zero_output(tiny: Callable[[str], Path], target: Path, factor: float = 0.0) -> Path:
    """A Llama whose second layer adds nothing, as LLaMA Pro initializes new ones, and has a query of zeros."""
    shutil.copytree(tiny("llama"), target)
    for name in (DOWN, DOWN.replace("mlp.down", "self_attn.o"), DOWN.replace("mlp.down", "self_attn.q")):
        change_tensor(target / SINGLE, name, partial(scaled, factor=factor))
    return target


@pytest.mark.quick_rows("a8w8-1e-38")
@pytest.mark.parametrize("factor", slow_but([0.0, 1e-38, 1e-40], 1e-38))
@pytest.mark.parametrize("quant", ["int4", "int8", "a8w8"])
def test_a_matrix_of_zeros_passes(quant: str, factor: float, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = zero_output(tiny, tmp_path / "model", factor)
    export(model, tmp_path / "out", incremental=True, quant=quant)
    report = verify(tmp_path / "out", reference=model, scenario=FIRST)
    assert report.verdict == "pass", report.closing_lines()


def one_code(codes: Array) -> Array:
    codes[1, 0, 0] ^= 0x11
    return codes


def one_scale(scales: Array) -> Array:
    scales[1, 0] = 0.5
    return scales


def all_codes(codes: Array) -> Array:
    return codes ^ 0x11


TAMPERED: dict[str, tuple[tuple[str, Callable[[Array], Array]], ...]] = {
    "a code": ((".codes", one_code),),
    "a scale": ((".scales", one_scale),),
    "a code and a scale": ((".codes", one_code), (".scales", one_scale)),
    "all values": ((".codes", all_codes), (".scales", np.ones_like)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", TAMPERED)
def test_a_changed_matrix_of_zeros_is_named(fault: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = zero_output(tiny, tmp_path / "model")
    export(model, tmp_path / "out", incremental=True, quant="int4")
    broken = tmp_path / "out"
    for suffix, edit in TAMPERED[fault]:
        broken = damaged(broken, tmp_path / f"broken{suffix}", DOWN + suffix, edit)
    assert DOWN in weights(verify(broken, reference=model, scenario=FIRST))


@pytest.mark.slow
def test_graphs_with_codes_that_the_manifest_does_not_record_fail(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    export(tiny("llama"), out := tmp_path / "out", incremental=True, quant="int4")
    manifest = json.loads((out / "llmconv.json").read_text())
    del manifest["steps"][0]["options"]["quant"]
    (out / "llmconv.json").write_text(json.dumps(manifest))
    report = verify(out, reference=tiny("llama"), scenario=FIRST)
    assert any(
        "records an export without `quant`" in check.detail for check in report.checks if check.verdict == "fail"
    )
