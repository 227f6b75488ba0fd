"""Faults in quantized folders of every kind of family are found, and folders without one pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmconv.export import export
from llmconv.verify import verify
from tests.builders.mutants.quantized_folders import FOLDER_MUTANTS, FolderMutant
from tools.random_weights import draw_weights
from tools.tiny_models import depth, save_tiny

FAMILIES = ("llama", "gpt2", "gemma2", "mixtral", "bloom", "phi3")
ONE = ("prefill, 7 tokens",)
PRESETS: dict[str, dict[str, Any]] = {
    "int8": {"quant": "int8"},
    "int4": {"quant": "int4"},
    "int4, symmetric": {"quant": "int4", "symmetric": True},
    "int4-mixed": {"quant": "int4-mixed"},
    "int4-small": {"quant": "int4-small", "quant_block": 32},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model(model_type)` is a tiny model."""
    made: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(model_type) / "model"
            save_tiny(model_type, made[model_type], depth(model_type))
        return made[model_type]

    return folder


@pytest.fixture(scope="module")
def four(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`four(model_type)` is the model in 4 bits with zero points; two blocks in each row at least."""
    made: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(model_type) / "out"
            export(model(model_type), made[model_type], incremental=True, quant="int4", quant_block=16)
        return made[model_type]

    return folder


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("mutant", FOLDER_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fails(
    mutant: FolderMutant,
    model_type: str,
    model: Callable[[str], Path],
    four: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    if not mutant.apply(four(model_type), tmp_path / "mutant"):
        pytest.skip("no place for it in this family")
    assert verify(tmp_path / "mutant", reference=model(model_type), scenario=ONE, allow_changed=True).verdict == "fail"


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_clean_folder_passes(preset: str, model_type: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    for seed, size in ((1, 0.5), (2, 2.0)):
        drawn, out = tmp_path / f"model-{seed}", tmp_path / f"out-{seed}"
        shutil.copytree(model(model_type), drawn)
        draw_weights(drawn, seed, size)
        export(drawn, out, incremental=True, **PRESETS[preset])
        report = verify(out, reference=drawn, scenario=(*ONE, "decode chain, 16 steps"))
        assert report.verdict == "pass", report.lines()
