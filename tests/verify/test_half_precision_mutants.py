"""Mutants of graphs that `export --precision` wrote: half precision hides none of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from llmconv.export import export
from llmconv.verify import verify
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.mutants import MUTANTS, VOID_IN, Mutant
from tests.conftest import save_tiny
from tests.export.test_precision import cast_folder

pytestmark = pytest.mark.slow

FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "bloom")
DTYPES = ("float16", "bfloat16")
ROUNDED_AWAY = {
    ("bfloat16", "activation in another form", "llama"),
    ("bfloat16", "activation in another form", "qwen3"),
}
"""The sigmoid's factor of 1.001 is 1 in bfloat16."""

CASES = [
    pytest.param(name, dtype, mutant, id=f"{name}-{dtype}-{mutant.name}")
    for name in FAMILIES
    for dtype in DTYPES
    for mutant in MUTANTS
    if name in mutant.families and mutant.name not in VOID_IN[dtype] and (dtype, mutant.name, name) not in ROUNDED_AWAY
]


@pytest.fixture(scope="session")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Eager]]:
    """`rounded(model_type, dtype)` is a folder with one graph in half precision, and its reference."""
    made: dict[tuple[str, str], tuple[Path, Eager]] = {}

    def folder(model_type: str, dtype: str) -> tuple[Path, Eager]:
        if (model_type, dtype) not in made:
            target = cast_folder(save_tiny(model_type, tmp_path_factory.mktemp(f"{model_type}-{dtype}")), dtype)
            export(target, prefill=False, incremental=True, precision=dtype)
            made[model_type, dtype] = target, Eager(target, dtype, keep=True)
        return made[model_type, dtype]

    return folder


@pytest.mark.one_row_in(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_correct_export_passes(
    model_type: str, dtype: str, rounded: Callable[[str, str], tuple[Path, Eager]]
) -> None:
    folder, eager = rounded(model_type, dtype)
    report = verify(folder, eager=eager)
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.one_row_in(8)
@pytest.mark.parametrize(("model_type", "dtype", "mutant"), CASES)
def test_every_mutant_is_caught(
    model_type: str,
    dtype: str,
    mutant: Mutant,
    rounded: Callable[[str, str], tuple[Path, Eager]],
    tmp_path: Path,
) -> None:
    folder, eager = rounded(model_type, dtype)
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "llmconv.json").write_text(json.dumps({"graphs": {"decode": {"file": "decode.onnx"}}}))
    model = onnx.load(broken / "decode.onnx", load_external_data=False)
    assert mutant.apply(model, broken)
    onnx.save(model, broken / "decode.onnx")
    report = verify(broken, reference=folder, eager=eager)
    assert any(check.verdict == "fail" and check.name != "decisions" for check in report.checks)
