"""`merge-lora --check`: what was written is compared with the float64 sum, and any other bit is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from peft import HRAConfig, LoHaConfig, LoraConfig
from safetensors.torch import load_file, save_file

from llmconv.cli import main
from llmconv.convert import merge_lora
from llmconv.convert.adapters.base_checks import SAMPLE, SampleCheck, _distances, check_written
from llmconv.errors import UsageProblem
from tests.builders.tuned_models import train_layers

TARGETS = ["linear", "square"]
LORA = LoraConfig(r=3, target_modules=TARGETS, init_lora_weights=False, modules_to_save=["norm"])


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LORA, {}),
        (LORA, {"weights": [0.3]}),
        (LoHaConfig(r=2, target_modules=TARGETS, init_weights=False), {"dtype": "float16"}),
        (HRAConfig(r=2, target_modules=TARGETS), {"dtype": "bfloat16"}),
        (LORA, {"combine": "dare_ties", "densities": [0.5], "dtype": "float16"}),
    ],
    ids=["lora", "weighted lora", "loha", "hra", "combined"],
)
def test_a_merge_passes(config: Any, options: dict[str, Any], tmp_path: Path) -> None:
    base, adapter, _ = train_layers(tmp_path, config)
    merge = merge_lora(base, [adapter], tmp_path / "out", check=True, **options)
    assert merge.check is not None and not merge.check.differing
    assert merge.check.tensors == len(load_file(base / "model.safetensors"))
    assert merge.check.histogram["0"] == merge.check.elements > 2000


@pytest.mark.parametrize("name", ["linear.weight", "norm.bias", "square.weight", "embedding.weight"])
def test_one_wrong_bit_is_found(name: str, tmp_path: Path) -> None:
    base, adapter, _ = train_layers(tmp_path, LORA)
    merge = merge_lora(base, [adapter], tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(torch.int32).view(-1)[-1] ^= 1
    save_file(tensors, file)
    check = check_written(merge.plan.checkpoint, merge.edits, tmp_path / "out", summed=True)
    assert check.differing == (name,) and check.histogram["1"] == 1
    assert name in check.lines()[-1]


def test_a_wrong_scale_is_found_though_the_merge_agrees_with_itself(tmp_path: Path) -> None:
    base, adapter, _ = train_layers(tmp_path, LORA)
    merge = merge_lora(base, [adapter], tmp_path / "out", weights=[1.001])
    right = merge_lora(base, [adapter], tmp_path / "right", dry_run=True)
    check = check_written(merge.plan.checkpoint, right.edits, tmp_path / "out", summed=True)
    assert set(check.differing) == {"linear.weight", "square.weight"}


def test_only_a_sample_of_many_tensors_is_read(tmp_path: Path) -> None:
    base, adapter, _ = train_layers(tmp_path, LORA)
    merge = merge_lora(base, [adapter], tmp_path / "out")
    plan = merge.plan.checkpoint
    many = {f"{number}.weight": plan["norm.weight"] for number in range(100)}
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(
        {name: torch.from_numpy(tensor.read().copy()) for name, tensor in many.items()}, folder / "model.safetensors"
    )
    check = check_written(replace(plan, tensors=many), merge.edits, folder, summed=True)
    assert check.tensors == SAMPLE and not check.differing


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_distances_count_representable_numbers(dtype: Any) -> None:
    kind = np.dtype(dtype)
    bits = np.array([0, 1, 2, 3, 5, 10, 100]).astype(f"i{kind.itemsize}")
    exact = np.zeros(7).astype(kind)
    assert _distances(bits.view(kind), exact).tolist() == [1, 1, 1, 1, 1, 2]
    assert _distances(-bits.view(kind), exact).tolist() == [1, 1, 1, 1, 1, 2]


def run(base: Path, adapter: Path, out: Path, *options: str) -> Any:
    """The command."""
    return CliRunner().invoke(main, ["merge-lora", str(base), str(adapter), "-o", str(out), "--check", *options])


def test_the_command_prints_one_sentence_and_no_table_of_zeros(tmp_path: Path) -> None:
    base, adapter, _ = train_layers(tmp_path, LORA)
    result = run(base, adapter, tmp_path / "out")
    assert result.exit_code == 0
    assert " ULP" not in result.stdout and "every element" in result.stdout.splitlines()[-1]


def test_both_neighbors_of_a_tie_are_exact_and_no_others() -> None:
    """1 of 12 million elements of a float32 merge is so near to the middle that the order of the sum decides."""
    low = np.float32(0.7)
    high = np.nextafter(low, np.float32(1))
    middle = (np.float64(low) + np.float64(high)) / 2
    for exact, equal in ((middle * (1 + 2.0**-50), 2), (middle * (1 + 2.0**-40), 1)):
        found = _distances(np.array([low, high]), np.array([exact, exact]))
        assert found.tolist()[:2] == [equal, 2 - equal]


def test_a_table_of_distances_is_printed_where_one_is_not_zero() -> None:
    lines = SampleCheck(1, 5, {"0": 4, "1": 1}, ("a.weight",)).lines()
    assert lines[1:] == ["     0 ULP               4", "     1 ULP               1", "differs: a.weight"]


def test_json_has_the_histogram(tmp_path: Path) -> None:
    base, adapter, _ = train_layers(tmp_path, LORA)
    check = json.loads(run(base, adapter, tmp_path / "out", "--json").stdout)["check"]
    assert check["differing"] == [] and check["ulp"]["0"] == check["elements"]


def test_a_difference_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter, _ = train_layers(tmp_path, LORA)
    multiply = np.matmul
    monkeypatch.setattr(np, "matmul", lambda *args, **kwargs: multiply(args[0] * 1.001, *args[1:], **kwargs))
    result = run(base, adapter, tmp_path / "out")
    assert result.exit_code == 1 and "differs: " in result.stdout


def test_a_dry_run_cannot_be_checked(tmp_path: Path) -> None:
    base, adapter, _ = train_layers(tmp_path, LORA)
    with pytest.raises(UsageProblem, match="dry run"):
        merge_lora(base, [adapter], tmp_path / "out", check=True, dry_run=True)
