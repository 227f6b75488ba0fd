"""Clean runs and mutants in float16 and bfloat16: the half-precision part of `make mutants`.

A float32 export is converted to half precision as exporters do it (`tests/builders/half_precision.py`); its mutants are
converted with their faults. `llmconv verify` judges each as it is and as a float32 copy, and both are recorded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from llmconv.export import export
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify import Report, verify_graphs
from llmconv.verify.comparison.half_precision import IN_FLOAT32
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Check
from llmconv.verify.sigma import GATES
from tests.builders.half_precision import round_weights, to_half
from tests.builders.mutants.mutants import MUTANTS, VOID_IN, Mutant
from tests.conftest import save_tiny
from tools.random_weights import SETTINGS, SIZES, draw_weights

ONE_THREAD = [settings for settings in SETTINGS if settings.threads == 1]
FAMILIES = ("llama", "qwen3", "gemma2", "gpt2")


@dataclass
class HalfClean:
    """One set of random weights: the largest sigma of an output and of a row, of the graph and of its float32 copy."""

    sigma: float
    row_sigma: float
    wide_sigma: float
    wide_row_sigma: float
    verdict: str


@dataclass
class HalfKilled:
    """One mutant: its largest sigma, of the graph and of its float32 copy, and what caught it.

    Attributes:
        sigma, row_sigma: of the half-precision graph, over an output and in its worst row.
        plain: the half-precision graph fails without sigma: another likeliest token, another shape, NaN.
        caught_by: `half`, `float32`, `audit`.
    """

    name: str
    sigma: float
    row_sigma: float
    plain: bool
    wide_sigma: float
    verdict: str
    caught_by: list[str]
    where: str
    right_place: bool


@dataclass
class HalfFamily:
    """All runs of one family in one precision."""

    model_type: str
    clean: list[HalfClean] = field(default_factory=list)
    mutants: list[HalfKilled] = field(default_factory=list)


def half_runs(model_type: str, dtype: str, draws: int, folder: Path) -> Iterator[HalfFamily]:
    """All runs of one family in one precision, as far as it has come.

    The weights as they were made and every draw of them run at every level of optimization.
    """
    family = HalfFamily(model_type)
    model = save_tiny(model_type, folder / model_type)
    export(model, prefill=False, incremental=True)
    round_weights(model, dtype)
    eager = Eager(model, dtype, keep=True)
    for mutant in MUTANTS:
        if model_type in mutant.families and mutant.name not in VOID_IN[dtype]:
            family.mutants.append(_mutant_run(mutant, model, folder / "mutant", eager))
            yield family
    for seed in range(-1, draws):
        if seed >= 0:
            draw_weights(model, seed, SIZES[seed % len(SIZES)])
            round_weights(model, dtype)
            eager = Eager(model, dtype, keep=True)
        for settings in ONE_THREAD:
            family.clean.append(_clean_run(model, folder / "half", eager, settings))
            yield family


def _clean_run(model: Path, target: Path, eager: Eager, settings: SessionSettings) -> HalfClean:
    """The graph on the weights as they are."""
    graph = to_half(model / "decode.onnx", target / "decode.onnx", eager.dtype)
    report = verify_graphs([graph], reference=model, eager=eager, settings=settings)
    half, wide = _by_copy(report)
    return HalfClean(*_largest(half), *_largest(wide), report.verdict)


def _mutant_run(mutant: Mutant, model: Path, target: Path, eager: Eager) -> HalfKilled:
    """A mutant of the float32 graph, converted."""
    graph = half_mutant(mutant, model, target, eager.dtype)
    report = verify_graphs([graph], reference=model, eager=eager, settings=ONE_THREAD[0])
    half, wide = _by_copy(report)
    audit = [check for check in report.checks if check.name in {"weights", "structure"}]
    sides = {"half": half, "float32": wide, "audit": audit}
    caught = [name for name, checks in sides.items() if any(check.verdict == "fail" for check in checks)]
    right = report.where is not None and mutant.is_at(report.where.layer, eager.num_layers)
    where = report.where.text if report.where else ""
    gates = GATES[eager.dtype]
    plain = any(c.verdict == "fail" and c.sigma <= gates.aggregate and c.row_sigma <= gates.row for c in half)
    found = (*_largest(half), plain, _largest(wide)[0])
    return HalfKilled(mutant.name, *found, report.verdict, caught, where, right)


def half_mutant(mutant: Mutant, model: Path, target: Path, dtype: str) -> Path:
    """The half-precision graph of a mutant, in a folder of its own."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model, target)
    graph = onnx.load(target / "decode.onnx", load_external_data=False)
    assert mutant.apply(graph, target), mutant.name
    onnx.save(graph, target / "decode.onnx")
    return to_half(target / "decode.onnx", target / "half" / "decode.onnx", dtype)


def _by_copy(report: Report) -> tuple[list[Check], list[Check]]:
    """The checks of outputs of the half graph, and of its float32 copy."""
    checks = [check for check in report.checks if check.output]
    wide = [check for check in checks if check.name.endswith(IN_FLOAT32)]
    return [check for check in checks if check not in wide], wide


def _largest(checks: list[Check]) -> tuple[float, float]:
    return max((c.sigma for c in checks), default=0.0), max((c.row_sigma for c in checks), default=0.0)
