"""`verify` of quantized graphs that are static, in stages, choose tokens or have a prefix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmconv.export import export
from llmconv.verify import Report, verify
from tests.builders.mutants.quantized_folders import FOLDER_MUTANTS, FolderMutant
from tests.builders.prefix_models import save_adapter
from tests.builders.talking import save_letters
from tools.tiny_models import depth, save_tiny

ONE = ("prefill, 7 tokens",)
KINDS: dict[str, dict[str, Any]] = {
    "static": {"shapes": "static", "prompt_len": 16, "max_seq_len": 64},
    "stages": {"stages": 2},
    "argmax": {"postprocess": "argmax"},
    "topk": {"postprocess": "topk:4", "last_logits": True},
    "prefix": {"prefix": "PrefixTuning"},
    "soft prompt": {"prefix": "PromptTuning"},
    "stages of tokens": {"stages": 2, "postprocess": "argmax"},
}
SLOW = ("static", "stages", "topk")
PRESETS = ("int8", "int4", "a8w8")
STORED_MUTANTS = [mutant for mutant in FOLDER_MUTANTS if mutant.store]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model(model_type)` is a tiny model with a tokenizer."""
    made: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(model_type) / "model"
            save_tiny(model_type, made[model_type], depth(model_type))
            save_letters(made[model_type])
        return made[model_type]

    return folder


@pytest.fixture(scope="module")
def made(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`made(model_type, kind, preset)` is a folder of prefill.onnx and decode.onnx; do not write into it."""
    folders: dict[tuple[str, ...], Path] = {}

    def folder(model_type: str, kind: str, preset: str = "int4") -> Path:
        key = model_type, kind, preset
        if key not in folders:
            target = tmp_path_factory.mktemp("made")
            options = dict(KINDS[kind])
            if "prefix" in options:
                options["prefix"] = save_adapter(model(model_type), target / "adapter", options["prefix"])
            folders[key] = target / "out"
            export(
                model(model_type), folders[key], quant=preset, quant_block=16 if preset == "int4" else None, **options
            )
        return folders[key]

    return folder


def failed(report: Report) -> set[str]:
    return {check.name for check in report.checks if check.verdict == "fail"}


@pytest.mark.one_row_in(3)
@pytest.mark.quick_rows("prefix")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in KINDS])
def test_codes_scenarios_and_cost_of_every_kind_are_compared(
    kind: str, model: Callable[[str], Path], made: Callable[..., Path]
) -> None:
    report = verify(made("llama", kind), reference=model("llama"), scenario=ONE)
    assert report.verdict == "pass", report.lines()
    assert {"weights", *ONE, "cost of quantization"} <= {check.name for check in report.checks}
    assert report.quantization and report.quantization.cost and report.quantization.rounding


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_code_fails(
    kind: str, model: Callable[[str], Path], made: Callable[..., Path], tmp_path: Path
) -> None:
    flipped = next(mutant for mutant in FOLDER_MUTANTS if "one bit" in mutant.name)
    assert flipped.apply(made("llama", kind), tmp_path / "mutant")
    assert "weights" in failed(verify(tmp_path / "mutant", reference=model("llama"), scenario=ONE))


@pytest.mark.slow
def test_limits_of_the_cost_apply_to_chosen_tokens(model: Callable[[str], Path], made: Callable[..., Path]) -> None:
    report = verify(made("llama", "argmax"), reference=model("llama"), scenario=ONE, max_divergence=1e-6)
    assert failed(report) == {"cost of quantization"}
    assert any("logits from which the graphs choose" in note for note in report.notes)


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_scenarios_of_a_clean_folder_pass(
    kind: str, preset: str, model_type: str, model: Callable[[str], Path], made: Callable[..., Path]
) -> None:
    report = verify(made(model_type, kind, preset), reference=model(model_type))
    assert report.verdict == "pass", report.lines()


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "stages", "argmax", "prefix"])
@pytest.mark.parametrize("mutant", STORED_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_in_what_is_stored_fails(
    mutant: FolderMutant, kind: str, model: Callable[[str], Path], made: Callable[..., Path], tmp_path: Path
) -> None:
    if not mutant.apply(made("llama", kind), tmp_path / "mutant"):
        pytest.skip("no place for it in this model")
    assert verify(tmp_path / "mutant", reference=model("llama"), scenario=ONE, allow_changed=True).verdict == "fail"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "argmax"])
def test_products_that_read_each_others_codes_fail(
    kind: str, model: Callable[[str], Path], made: Callable[..., Path], tmp_path: Path
) -> None:
    exchanged = next(mutant for mutant in FOLDER_MUTANTS if "each other" in mutant.name)
    assert exchanged.apply(made("llama", kind), tmp_path / "mutant")
    assert set(ONE) & failed(verify(tmp_path / "mutant", reference=model("llama"), scenario=ONE, allow_changed=True))
