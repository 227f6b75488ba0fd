"""Faults that ask for a length, a batch size or a position are met."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from llmconv.verify import Report, verify
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.triggers import TRIGGERS, Trigger
from tests.verify.conftest import decode_only

FAMILIES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gemma2", "bloom"))]


def triggered(trigger: Trigger, exported: Path, eager: Eager, folder: Path) -> Report:
    """The report on a graph with that fault, of the one scenario that meets it."""
    target = decode_only(exported, folder)
    model = onnx.load(target / "decode.onnx", load_external_data=False)
    trigger.apply(model, target)
    onnx.save(model, target / "decode.onnx")
    return verify(target, reference=exported, eager=eager, scenario=[trigger.met_by])


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda trigger: trigger.name)
def test_a_fault_in_some_calls_only_is_reached(
    trigger: Trigger,
    model_type: str,
    exported: Callable[[str], Path],
    eager: Callable[[str], Eager],
    tmp_path: Path,
) -> None:
    if model_type == "bloom" and "position" in trigger.name:
        pytest.skip("bloom takes no positions")
    report = triggered(trigger, exported(model_type), eager(model_type), tmp_path / "graph")
    assert (trigger.met_by, "logits") in {(c.name, c.output) for c in report.checks if c.verdict == "fail"}
