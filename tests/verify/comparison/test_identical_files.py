"""One graph under two names is run once, and both names have every check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmconv.verify import Report, verify
from tests.builders.mutants.mutants import Mutant
from tests.builders.mutants.wiring import mask_too_weak


def checked(report: Report, graph: str) -> list[tuple[str, str, float]]:
    """What was measured of a graph."""
    return [(check.name, check.output, check.sigma) for check in report.checks if check.graph == graph and check.output]


def test_a_copy_has_the_checks_of_the_original_and_says_so(clean_report: Report) -> None:
    assert checked(clean_report, "prefill.onnx") == checked(clean_report, "decode.onnx") != []
    notes = {check.detail for check in clean_report.checks if check.graph == "decode.onnx" and check.output}
    assert notes == {"the same bytes as prefill.onnx"}


def test_a_changed_graph_is_run_itself(exported: Callable[[str], Path], broken: Callable[..., Path]) -> None:
    folder = broken("llama", Mutant("mask too weak", mask_too_weak))
    (folder / "prefill.onnx").write_bytes((exported("llama") / "prefill.onnx").read_bytes())
    (folder / "llmconv.json").unlink()
    report = verify(folder, reference=exported("llama"), scenario=["left padding"])
    verdicts = {
        graph: {c.verdict for c in report.checks if c.graph == graph and c.name == "left padding"}
        for graph in ("prefill.onnx", "decode.onnx", "prefill.onnx+decode.onnx")
    }
    assert verdicts["prefill.onnx"] == {"pass"}
    assert "fail" in verdicts["decode.onnx"]
    assert verdicts["prefill.onnx+decode.onnx"]
