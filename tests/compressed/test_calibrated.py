"""`quantize --calibrate`: the codes are those of `export --quant`, and `verify` says what it can show of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from llmconv.checkpoint import open_checkpoint
from llmconv.compressed import quantize
from llmconv.convert.inspection import inspect
from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export import export
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.tensors import Array
from llmconv.verify import verify
from tests.builders.safetensors import change_tensor
from tests.builders.talking import save_letters

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
NORM, UP = "model.layers.1.post_attention_layernorm.weight", "model.layers.1.mlp.up_proj"


def save(folder: Path, config: Any, dtype: torch.dtype) -> Path:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():  # channels of other sizes, so that factors differ
        for name, one in model.named_parameters():
            one.mul_(torch.exp2(2 * torch.randn_like(one))) if "norm" in name else one.mul_(4)
    model.save_pretrained(folder)
    return save_letters(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(np.random.default_rng(0).choice(list("abcdefghij klmno"), 2300)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("calibrated") / "model", LlamaConfig(**SMALL), torch.float32)


@pytest.fixture(scope="module")
def made(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a method, made once; do not write into it."""
    home = tmp_path_factory.mktemp("made")

    def folder(method: str, scheme: str = "w4a16", **options: Any) -> Path:
        path = home / "-".join([method, scheme, *map(str, options.values())])
        if not path.exists():
            quantize(model, path, scheme=scheme, quant_block=32, method=method, calibrate=text, **options)
        return path

    return folder


def codes_of(folder: Path) -> dict[str, tuple[Array, Array, Array | None]]:
    """Codes [N, K], scales [N, groups], and zero points [N, groups] by name."""
    found = quantized_checkpoint(open_checkpoint(folder))
    assert found
    weights: Any = found.weights
    return {
        name: (one.codes(0, one.shape[0]), one.read_scales(), one.read_zeros() if one.read_zeros else None)
        for name, one in weights.items()
    }


def exported_codes(path: Path, name: str) -> tuple[Array, Array, Array | None]:
    tensors = load_file(path / "quantized.safetensors")
    pairs, scales = tensors[f"{name}.codes"], tensors[f"{name}.scales"]
    spread = [np.stack([one & 15, one >> 4], -1) for one in (pairs, tensors.get(f"{name}.zeros", pairs))]
    zeros = spread[1].reshape(len(scales), -1)[:, : scales.shape[1]] if f"{name}.zeros" in tensors else None
    return spread[0].reshape(len(scales), -1), scales, zeros


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-asym"])
@pytest.mark.parametrize("method", ["search", "gptq", "awq"])
def test_codes_are_those_of_an_export(
    method: str, scheme: str, model: Path, text: Path, made: Callable[..., Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"quant": "int4", "quant_block": 32, "symmetric": scheme == "w4a16"}
    export(model, tmp_path / "out", unified=True, method=method, calibrate=text, **options)
    found = codes_of(made(method, scheme))
    assert len(found) == 14
    for name, parts in found.items():
        for one, other in zip(parts, exported_codes(tmp_path / "out", name), strict=True):
            assert (one is None and other is None) or (one is not None and other is not None), name
            assert one is None or other is None or np.array_equal(one, other), name


def test_norms_are_divided_by_powers_of_two(model: Path, made: Callable[..., Path]) -> None:
    stored, plain = (load_file(path / "model.safetensors") for path in (made("awq"), model))
    factors = plain[NORM] / stored[NORM]
    assert (np.frexp(factors)[0] == 0.5).all() and (factors != 1).any()
    assert np.array_equal(stored["model.norm.weight"], plain["model.norm.weight"])


@pytest.mark.parametrize("method", ["search", "gptq", "awq"])
@pytest.mark.quick_rows("awq")
def test_an_honest_folder_passes_and_its_verdict_is_recorded(
    method: str, model: Path, made: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made(method), tmp_path / method))
    report = verify(folder, reference=model)
    assert report.exit_code == 0, report.lines()
    assert report.quantization and report.quantization.rounding and report.quantization.excess
    assert {check.name for check in report.checks} >= ({"factors"} if method == "awq" else {"codes"})
    shown = inspect(folder).summary()["verified"]
    assert shown["verdict"] == "pass" and not shown["out_of_date"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    assert inspect(folder).summary()["verified"]["changed"] == ["config.json"]


def copied(folder: Path, tmp_path: Path) -> Path:
    """A folder whose manifest does not tell of changes in its weights."""
    path = Path(shutil.copytree(folder, tmp_path / "copy"))
    record = json.loads((path / "llmconv.json").read_text())
    del record["files"]["model.safetensors"]
    (path / "llmconv.json").write_text(json.dumps(record))
    return path


def at_random(array: Array) -> Array:
    return np.random.default_rng(1).integers(-(2**31), 2**31, array.shape).astype(array.dtype)


def first_code(array: Array) -> Array:
    changed = array.copy()
    changed[5, 0] ^= 4
    return changed


def larger(array: Array) -> Array:
    changed = array.copy()
    changed[2, 0] *= 3
    return changed


def doubled(array: Array) -> Array:
    changed = array.copy()
    changed[9] *= 2
    return changed


DAMAGE = [
    ("search", f"{UP}.weight_packed", first_code, "codes", "a code that is not the nearest at row 5"),
    ("search", f"{UP}.weight_scale", larger, "codes", "the scale of row 2"),
    ("gptq", f"{UP}.weight_packed", at_random, "codes", UP),
    ("gptq", f"{UP}.weight_packed", first_code, "codes", "a code that is not the nearest at row 5, column 0"),
    ("gptq", f"{UP}.weight_scale", larger, "codes", "is"),
    ("awq", f"{UP}.weight_packed", first_code, "codes", "a code that is not the nearest at row 5"),
    ("awq", NORM, doubled, "codes", "is"),
    ("awq", NORM, lambda one: one * 1.5, "kept tensors", f"`{NORM}` differs"),
    ("awq", "model.norm.weight", doubled, "factors", "another function"),
    ("gptq", NORM, doubled, "kept tensors", f"`{NORM}` differs"),
    ("awq", f"{UP}.weight_scale", lambda one: np.concatenate([one[:7], 2 * one[7:8], one[8:]]), "factors", "another"),
]


@pytest.mark.parametrize(("method", "name", "edit", "check", "words"), DAMAGE, ids=map(str, range(len(DAMAGE))))
@pytest.mark.quick_rows("3", "8")
def test_damage_is_found(
    method: str,
    name: str,
    edit: Callable[[Array], Array],
    check: str,
    words: str,
    model: Path,
    made: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = copied(made(method), tmp_path)
    change_tensor(folder / "model.safetensors", name, edit)
    report = verify(folder, reference=model)
    failed = [one for one in report.checks if one.verdict == "fail"]
    assert report.exit_code == 1 and failed[0].name == check and words in failed[0].detail, failed


def test_a_text_does_not_run_through_weights_that_are_not_stored(model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="not stored in bfloat16 yet"):
        quantize(model, tmp_path / "out", scheme="w4a16", quant_block=32, calibrate=text, dtype="bfloat16")


@pytest.mark.slow
def test_what_a_text_cannot_run_through_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"scheme": "w4a16", "quant_block": 32, "calibrate": text}
    (tmp_path / "short.txt").write_text("abcdefgh " * 60)
    with pytest.raises(InputRefused, match="`--method gptq` needs 2,048 for 128 columns"):
        quantize(model, tmp_path / "out", **{**given, "calibrate": tmp_path / "short.txt"}, method="gptq")
    gemma = save(tmp_path / "gemma", Gemma2Config(**SMALL, query_pre_attn_scalar=32), torch.float32)
    with pytest.raises(UnsupportedInput, match="`--method awq` does not fit this model"):
        quantize(gemma, tmp_path / "out", method="awq", quant_exclude="up_proj", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_model_whose_norms_take_no_factors_has_some_in_its_gated_units(text: Path, tmp_path: Path) -> None:
    gemma = save(tmp_path / "gemma", Gemma2Config(**SMALL, query_pre_attn_scalar=32), torch.float32)
    up = "model.layers.0.mlp.up_proj.weight"
    louder = np.where(np.arange(SMALL["intermediate_size"]) % 9, 1, 30)[:, None]
    change_tensor(gemma / "model.safetensors", up, lambda rows: rows * louder)
    quantize(gemma, tmp_path / "out", scheme="w4a16", quant_block=32, calibrate=text, method="awq")
    found, plain = codes_of(tmp_path / "out"), load_file(gemma / "model.safetensors")
    scales, peaks = np.abs(found[up][1]).max(axis=1), np.abs(plain[up]).max(axis=1) / 8
    assert {*np.rint(np.log2(peaks / scales)).astype(int)} > {0}
    report = verify(tmp_path / "out", reference=gemma)
    assert report.exit_code == 0, report.lines()
    assert "gated matrices" in next(check.detail for check in report.checks if check.name == "factors")
