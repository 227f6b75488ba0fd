"""Clean exports pass, every mutant fails: the verifier is verified."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmconv.verify import verify
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.mutants import MUTANTS, Mutant
from tests.conftest import CONFIGS

QUICK = ("llama",)
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]
PAIRS = [
    pytest.param(name, mutant, id=f"{name}-{mutant.name}", marks=() if name in QUICK else pytest.mark.slow)
    for name in CONFIGS
    for mutant in MUTANTS
    if name in mutant.families
]


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_correct_export_passes(
    model_type: str, exported: Callable[[str], Path], eager: Callable[[str], Eager]
) -> None:
    report = verify(exported(model_type), eager=eager(model_type))
    assert report.verdict == "pass", report.closing_lines()
    assert report.worst and 0.3 < report.worst.sigma < 2, "calibration has moved: see docs/verification-sigma.md"


@pytest.mark.one_row_in(2)
@pytest.mark.quick_rows("llama-last token of the vocabulary unknown")
@pytest.mark.parametrize(("model_type", "mutant"), PAIRS)
def test_every_mutant_is_caught(
    model_type: str,
    mutant: Mutant,
    exported: Callable[[str], Path],
    broken: Callable[[str, Mutant], Path],
    eager: Callable[[str], Eager],
) -> None:
    report = verify(broken(model_type, mutant), reference=exported(model_type), eager=eager(model_type))
    assert any(check.verdict == "fail" and check.name != "decisions" for check in report.checks)
    assert report.where and report.where.text


PLACES = (
    ("one norm's epsilon times ten", 1),
    ("attention scale 1 % off in one layer", 2),
    ("attention softcap dropped in one layer", 3),
    ("two present names swapped", 1),
    ("key and value swapped", 2),
    ("first side of a residual dropped", 3),
    ("final softcap 10 % off", None),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), PLACES)
def test_the_first_layer_that_differs_is_named(
    name: str,
    layer: int | None,
    exported: Callable[[str], Path],
    broken: Callable[..., Path],
    eager: Callable[..., Eager],
) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    report = verify(broken("gemma2", mutant), reference=exported("gemma2"), eager=eager("gemma2"))
    assert report.where and report.where.layer == layer


@pytest.mark.slow
def test_the_reference_shares_no_code_with_the_exporter() -> None:
    code = "import sys, llmconv.verify; sys.exit(any(name.startswith('llmconv.export') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_two_runs_give_one_report(exported: Callable[[str], Path]) -> None:
    first, second = (verify(exported("llama")).as_dict() for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_the_full_suite_passes(exported: Callable[[str], Path]) -> None:
    report = verify(exported("gemma2"), suite="full")
    assert report.verdict == "pass"
    assert any(check.name == "decode chain, 64 steps" for check in report.checks)
