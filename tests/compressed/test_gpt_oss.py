"""gpt-oss is written as it is released: experts as MXFP4 in stacks, which transformers opens, the rest as it is."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig

from llmconv.cli import main
from llmconv.compressed import quantize
from llmconv.convert.inspection import inspect
from llmconv.errors import InputRefused, LlmconvError, UnsupportedInput, UsageProblem
from llmconv.tensors import Array
from llmconv.verify import verify
from tests.builders.safetensors import change_tensor
from tests.compressed.conftest import save

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": 0,
    "eos_token_id": 1,
}
DOWN = "model.layers.1.mlp.experts.down_proj"
STACKS = [f"model.layers.{at}.mlp.experts.{name}" for at in range(2) for name in ("gate_up_proj", "down_proj")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("gpt_oss") / "model", GptOssConfig(**SIZES))


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt_oss") / "made"
    quantize(model, path, scheme="mxfp4")
    return path


def opened(folder: Path) -> dict[str, torch.Tensor]:
    """What transformers computes with, of codes the values in bfloat16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    return state


def nearest(matrix: Array) -> Array:
    """Rows in groups of 32, each value the nearest e2m1 number times a power of two, of two the even code; float64."""
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = matrix.astype(np.float64).reshape(len(matrix), -1, 32)
    share, exponent = np.frexp(np.abs(groups).max(axis=-1, keepdims=True))
    scales = np.ldexp(1.0, exponent - 3 + (share >= 0.875))
    places = (np.abs(np.abs(groups / scales)[..., None] - sizes) + 1e-9 * (np.arange(8) % 2)).argmin(axis=-1)
    found: Array = (np.copysign(sizes[places], groups) * scales).reshape(matrix.shape)
    return found


def test_transformers_opens_the_nearest_values_and_everything_else_as_it_was(model: Path, made: Path) -> None:
    before, after = opened(model), opened(made)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name not in STACKS:
            assert torch.equal(tensor, after[name]), name
            continue
        assert after[name].dtype == torch.bfloat16
        for expert in range(4):
            wanted = nearest(tensor[expert].T.float().numpy())
            assert np.array_equal(after[name][expert].T.double().numpy(), wanted), name


def test_names_and_configuration_are_those_of_the_release(made: Path) -> None:
    stored = load_file(made / "model.safetensors")
    for name in STACKS:
        inputs, outputs = (64, 192) if "gate_up" in name else (96, 64)
        assert stored[name + "_blocks"].shape == (4, outputs, inputs // 32, 16)
        assert stored[name + "_scales"].shape == (4, outputs, inputs // 32)
        assert stored[name + "_scales"].dtype == stored[name + "_blocks"].dtype == torch.uint8 and name not in stored
    config = json.loads((made / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    assert config["quantization_config"] == {"modules_to_not_convert": kept, "quant_method": "mxfp4"}


def test_values_that_are_on_the_grid_stay_what_they_are(made: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_config(GptOssConfig(**SIZES), dtype=torch.bfloat16)
    plain.load_state_dict(opened(made))
    plain.save_pretrained(tmp_path / "tuned")
    quantize(tmp_path / "tuned", tmp_path / "again", scheme="mxfp4a16")
    one, two = (load_file(path / "model.safetensors") for path in (made, tmp_path / "again"))
    assert one.keys() == two.keys()
    found, wanted = (opened(path) for path in (tmp_path / "again", made))
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def test_verify_shows_an_honest_folder_and_records_it(model: Path, made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "made"))
    report = verify(folder, reference=model, min_agreement=0.2)
    assert report.exit_code == 0, report.lines()
    assert report.quantization and report.quantization.cost and len(report.quantization.weights) == 4
    assert inspect(folder).summary()["verified"]["verdict"] == "pass"


def in_the_third_expert(array: Array) -> Array:
    changed = array.copy()
    changed[(2, 5, *(1,) * (array.ndim - 2))] += 1
    return changed


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("_blocks", f"`{DOWN}[2]` has a code that is not the nearest at row 5, column 34"),
        ("_scales", f"`{DOWN}[2]` has a scale that is not its scheme's at row 5, column 1"),
        ("_bias", f"`{DOWN}_bias` differs from the model's at row 2"),
    ],
)
def test_damage_is_found_in_the_expert(end: str, words: str, model: Path, made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "made"))
    record = json.loads((folder / "llmconv.json").read_text())
    del record["files"]["model.safetensors"]
    (folder / "llmconv.json").write_text(json.dumps(record))
    change_tensor(folder / "model.safetensors", DOWN + end, in_the_third_expert)
    report = verify(folder, reference=model)
    failed = [check.detail for check in report.checks if check.verdict == "fail"]
    assert report.exit_code == 1 and words in failed[0], failed


def test_another_configuration_is_found(model: Path, made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "made"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].pop()
    (folder / "config.json").write_text(json.dumps(config))
    failed = [one.detail for one in verify(folder, reference=model).checks if one.verdict == "fail"]
    assert any("`quantization_config` is not that of gpt-oss" in one for one in failed)


def narrow(folder: Path) -> Path:
    return save(folder, GptOssConfig(**{**SIZES, "intermediate_size": 80}))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scheme": "w4a16"}, UnsupportedInput, "with its experts as MXFP4, and not as w4a16"),
        ({"scheme": "mxfp4", "quant_exclude": "0.mlp.experts"}, UsageProblem, "engines read all experts of gpt-oss"),
    ],
)
def test_what_no_reader_takes_is_refused(
    options: dict[str, Any], error: type[LlmconvError], words: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        quantize(model, tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


def test_inputs_that_are_not_in_groups_of_32_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="has 80 inputs, and MXFP4 has groups of 32"):
        quantize(narrow(tmp_path / "model"), tmp_path / "out", scheme="mxfp4")


def test_a_weight_that_is_not_finite_is_refused(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))

    def edit(array: Array) -> Array:
        changed = array.copy()
        changed[3, 7, 9] = np.nan
        return changed

    change_tensor(folder / "model.safetensors", DOWN, edit)
    with pytest.raises(InputRefused, match="contains infinite or NaN"):
        quantize(folder, tmp_path / "out", scheme="mxfp4")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_becomes_of_each_tensor(model: Path, tmp_path: Path) -> None:
    words = ["quantize", str(model), "-o", str(tmp_path / "out"), "--scheme", "mxfp4", "--dry-run"]
    shown = CliRunner().invoke(main, words).stdout
    assert f"{DOWN}_blocks  uint8  [4, 64, 3, 16]  quantized" in shown
    assert f"{DOWN}_scales  uint8  [4, 64, 3]  quantized" in shown
    assert f"{DOWN}_bias  bfloat16  [4, 64]  kept" in shown
    assert "4 weights as mxfp4" in shown
