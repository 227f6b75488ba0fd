"""An adapter that is given twice, that the base has already, or whose weight is 0 merges with a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from tests.builders.lora_models import causal_lm, train

SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in `base` and an adapter that PEFT saved in `adapter`."""
    folder = tmp_path_factory.mktemp("trained")
    model = causal_lm("llama", num_hidden_layers=1, num_key_value_heads=1, **SMALL)
    train(model, folder, merge=False, target_modules=["q_proj"])
    return folder


def warnings_of(out: Path, *arguments: Any) -> str:
    """What a merge that is made says on stderr."""
    done = CliRunner().invoke(main, ["merge-lora", *map(str, arguments), "-o", str(out)])
    assert done.exit_code == 0, done.stderr
    return done.stderr


def test_the_same_adapter_twice_is_named(trained: Path, tmp_path: Path) -> None:
    stderr = warnings_of(tmp_path / "out", trained / "base", trained / "adapter", trained / "adapter")
    assert "the adapter `adapter` is given twice" in stderr


def test_an_adapter_that_the_base_has_already_is_named(trained: Path, tmp_path: Path) -> None:
    assert "already merged" not in warnings_of(tmp_path / "once", trained / "base", trained / "adapter")
    stderr = warnings_of(tmp_path / "twice", tmp_path / "once", trained / "adapter")
    assert "the adapter `adapter` is already merged into `once`" in stderr


def test_a_weight_of_0_is_named(trained: Path, tmp_path: Path) -> None:
    stderr = warnings_of(tmp_path / "out", trained / "base", trained / "adapter", "--weight", 0)
    assert "has weight 0 and changes nothing" in stderr


def test_a_weight_of_0_is_not_said_to_change_nothing_where_tensors_are_replaced(tmp_path: Path) -> None:
    model = causal_lm("llama", num_hidden_layers=1, num_key_value_heads=1, **SMALL)
    train(model, tmp_path, merge=False, target_modules=["q_proj"], modules_to_save=["lm_head"])
    stderr = warnings_of(tmp_path / "out", tmp_path / "base", tmp_path / "adapter", "--weight", 0)
    assert "changes nothing" not in stderr and "the weight 0 does not apply to the 1 tensors it replaces" in stderr


@pytest.mark.parametrize("combine", ["ties", "dare_ties"])
def test_a_weight_of_0_counts_where_signs_are_elected(trained: Path, tmp_path: Path, combine: str) -> None:
    options = ("--weight", 1, "--weight", 0, "--combine", combine, "--density", 1)
    stderr = warnings_of(tmp_path / "out", trained / "base", trained / "adapter", trained / "adapter", *options)
    assert "has weight 0 and counts only where signs are elected" in stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--seed", "5"], "`--seed` does not apply to `--combine linear`"),
        (["--combine", "svd", "--majority-sign", "frequency"], "`--majority-sign` does not apply to `--combine svd`"),
    ],
)
def test_an_option_without_effect_is_refused(trained: Path, tmp_path: Path, options: list[str], problem: str) -> None:
    arguments = [str(trained / "base"), str(trained / "adapter"), "-o", str(tmp_path / "out"), *options]
    done = CliRunner().invoke(main, ["merge-lora", *arguments])
    assert done.exit_code == 2
    assert problem in done.stderr
    assert not (tmp_path / "out").exists()
