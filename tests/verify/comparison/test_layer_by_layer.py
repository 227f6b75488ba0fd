"""verify --low-memory: the same verdict, the same figures, from one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.errors import UnsupportedInput
from llmconv.export import export
from llmconv.runtime.low_memory.pieced_graph import PiecedGraph, cut_graph
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.onnxruntime.guard import values_read_by
from llmconv.verify import Report, verify
from llmconv.verify.comparison.run import AS_RUN
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Check
from llmconv.verify.scenarios.selection import Selection
from tests.builders.mutants.mutants import MUTANTS, Mutant
from tests.test_docs import ROOT

Tiny = Callable[[str], Path]
SMALL = 150_000
"""Bytes of a layer of the tiny models, or so."""
EDITING = ("rows exchanged", "tokens taken back", "garbage under the mask", "pasts of 30 to 1,022 tokens")
CROSSING = "window crossed behind a made-up past"
PLAIN = [scenario.name for scenario in Selection("quick").scenarios() if scenario.name not in (*EDITING, CROSSING)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are cut_graph although they are tiny, and tables are read by rows."""
    assert PiecedGraph.__init__.__kwdefaults__ and StreamedRunner.__init__.__kwdefaults__
    monkeypatch.setitem(PiecedGraph.__init__.__kwdefaults__, "piece", SMALL)
    monkeypatch.setitem(StreamedRunner.__init__.__kwdefaults__, "resident", 0)


def by_output(report: Report) -> dict[tuple[str, str, str], Check]:
    """Checks by scenario, graph and output, without those of the running form, which is never run in pieces."""
    found = {(check.name, check.graph, check.output): check for check in report.checks}
    return {key: check for key, check in found.items() if not key[1].endswith(AS_RUN)}


@pytest.mark.slow
def test_a_small_model_gets_the_same_report(exported: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmconv.verify.reference.eager.LEAST", 1 << 30)  # float64 call by call, as layer by layer
    streamed, usual = (verify(exported("llama"), scenario=PLAIN, low_memory=low) for low in (True, False))
    assert by_output(streamed) == by_output(usual)
    assert streamed.notes == usual.notes


@pytest.mark.slow
def test_noise_that_is_small_by_chance_is_measured_again(tmp_path: Path) -> None:
    to_hf(ROOT / "examples/tiny-llama/ep4-ba2400-rank0.pt", tmp_path / "model")
    export(tmp_path / "model")
    report = verify(tmp_path / "model", scenario=["left padding"], low_memory=True)
    assert report.verdict == "pass", report.summary()


@pytest.mark.slow
def test_graphs_with_lora_inputs_run_in_pieces(optioned: Callable[..., Path]) -> None:
    folder = optioned("llama", lora_inputs="all-linear")
    report = verify(folder, scenario=["left padding"], low_memory=True)
    assert report.verdict == "pass", report.summary()


def test_scenarios_that_edit_or_replace_a_cache_are_skipped_and_counted(exported: Tiny) -> None:
    names = ["left padding", *EDITING]
    report = verify(exported("llama"), scenario=names, low_memory=True)
    assert {check.verdict for check in report.checks if check.name in EDITING} == {"skip"}
    assert {check.name for check in report.checks if check.verdict == "skip"} == set(EDITING)
    assert report.verdict == "pass"
    assert "caches that are changed between two calls" in report.summary()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma2", "gpt2", "bloom", "qwen2"])
def test_a_graph_in_pieces_passes_with_sigmas_as_before(
    model_type: str, exported: Tiny, eager: Callable[..., Eager], small_pieces: None
) -> None:
    whole = by_output(verify(exported(model_type), scenario=PLAIN, eager=eager(model_type)))
    pieces = by_output(verify(exported(model_type), scenario=PLAIN, low_memory=True))
    assert whole.keys() == pieces.keys()
    for key, check in pieces.items():
        assert check.verdict == whole[key].verdict
        assert check.sigma == pytest.approx(whole[key].sigma, rel=0.5, abs=0.3), key


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), [("attention scale 1 % off in one layer", 2), ("two pasts swapped", 1)])
def test_a_mutant_in_pieces_is_caught(
    name: str, layer: int, exported: Tiny, broken: Callable[[str, Mutant], Path], small_pieces: None
) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    report = verify(broken("llama", mutant), reference=exported("llama"), low_memory=True)
    assert report.verdict == "fail"
    assert report.where and report.where.layer == layer


OPTIONS: list[dict[str, Any]] = [{"stages": 2}, {"postprocess": "topk:3", "last_logits": True}, {"opset": 21}]


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_graph_with_options_passes_in_pieces(
    options: dict[str, Any], optioned: Callable[..., Path], small_pieces: None
) -> None:
    report = verify(optioned("gemma2", **options), low_memory=True)
    assert report.verdict == "pass", report.closing_lines()


def test_pieces_contain_every_node_once_and_limited_weights(exported: Tiny) -> None:
    model = onnx.load(exported("llama") / "decode.onnx", load_external_data=False)
    pieces = cut_graph(model, SMALL)
    assert len(pieces) >= 4
    assert all(piece.weight_bytes <= SMALL for piece in pieces)
    made = [name for piece in pieces for name in piece.outputs]
    assert len(made) == len(set(made))
    assert {port.name for port in model.graph.output} <= set(made)


def test_a_piece_reads_only_earlier_values(exported: Tiny) -> None:
    model = onnx.load(exported("gemma2") / "prefill.onnx", load_external_data=False)
    known = {port.name for port in model.graph.input}
    for piece in cut_graph(model, SMALL):
        assert set(piece.inputs) <= known
        weights = {tensor.name for tensor in model.graph.initializer}
        inner = {name for node in piece.nodes for name in node.output} | weights | {""}
        assert all(values_read_by(node) <= inner | set(piece.inputs) for node in piece.nodes)
        known |= set(piece.outputs)


@pytest.mark.slow
def test_a_graph_with_a_shared_buffer_is_refused(optioned: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedInput, match="in pieces"):
        verify(optioned("llama", cache="shared-buffer"), low_memory=True)


def test_a_graph_with_a_prefix_is_refused(optioned: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedInput, match="with a prefix"):
        verify(optioned("llama", prefix="PrefixTuning"), low_memory=True)


@pytest.mark.slow
def test_the_command_takes_the_option(exported: Tiny) -> None:
    result = CliRunner().invoke(main, ["verify", str(exported("llama")), "--low-memory"])
    assert result.exit_code == 0, result.output
