"""Graphs with quantized weights: correctness with these weights, and loss of accuracy."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

from benchmarks import environments
from benchmarks.exporters import GENAI, add_tokenizer, command
from llmconv.cli import main
from llmconv.errors import InputRefused
from llmconv.verify import Report, verify, verify_graphs
from llmconv.verify.reference.eager import Eager
from llmconv.verify.report.files import render_markdown, write_report
from tests.builders.mutants.mutants import MUTANTS
from tests.builders.mutants.quantized import QUANTIZED_MUTANTS, QuantizedMutant
from tests.builders.quantizers import QUANTIZERS, quantizable
from tests.conftest import save_tiny
from tools.other_exporters import MODELS

Quantized = Callable[[str, str], Path]
Small = Callable[[str], Path]
ONE = ("prefill, 7 tokens",)
FOUR, LEVEL, INT8 = "4 bits", "4 bits, accuracy level 4", "dynamic int8"


@pytest.fixture(scope="session")
def full(small: Small) -> Callable[[str], Eager]:
    """`full(model_type)` is the model at full precision; it computes every scenario once."""
    kept: dict[str, Eager] = {}

    def eager(model_type: str) -> Eager:
        return kept.setdefault(model_type, kept.get(model_type) or Eager(small(model_type), "float32", keep=True))

    return eager


@pytest.fixture(scope="session")
def report(quantized: Quantized, small: Small, full: Callable[[str], Eager]) -> Report:
    """Of a graph that rounds activations, too; one scenario."""
    return verify_graphs([quantized("llama", LEVEL)], reference=small("llama"), eager=full("llama"), scenario=ONE)


def run(*arguments: object) -> Result:
    """The command's result."""
    return CliRunner().invoke(main, ["verify", *map(str, arguments), "--scenario", ONE[0]])


@pytest.mark.slow
def test_a_quantized_graph_is_compared_with_a_model_of_the_same_weights(report: Report) -> None:
    assert report.verdict == "pass"
    assert {check.name for check in report.checks if check.output} >= {*ONE, "prefill, 7 tokens, louder weights"}
    assert max(check.sigma for check in report.checks) < 2


@pytest.mark.slow
def test_rounding_of_activations_is_removed_and_reported(report: Report) -> None:
    assert report.quantization is not None
    assert report.quantization.rounded == ["MatMulNBits"]
    assert any("without the rounding of activations (MatMulNBits)" in note for note in report.notes)


def test_the_cost_is_measured_on_the_unchanged_graph(report: Report, quantized: Quantized, small: Small) -> None:
    other = verify_graphs(
        [quantized("llama", "4 bits with zero points")], reference=small("llama"), scenario=("first and last token",)
    )
    assert report.quantization and other.quantization and report.quantization.cost and other.quantization.cost
    with_rounding, without = (one.quantization.cost.divergence["mean"] for one in (report, other))  # type: ignore[union-attr]
    assert with_rounding != without and 1e-4 < without < 0.1


def test_the_report_has_a_section(report: Report, tmp_path: Path) -> None:
    section = json.loads(json.dumps(report.as_dict()))["quantization"]
    assert set(section["cost"]["divergence"]) == {"mean", "median", "p99", "p99_9", "max"}
    assert section["cost"]["source"] == "random tokens" and section["cost"]["perplexity"] is None
    assert len(section["weights"]) == 15 and all(0.05 < one["relative_error"] < 0.15 for one in section["weights"])
    assert any(line.startswith("QUANTIZATION | KL divergence mean") for line in report.closing_lines())
    assert "KL divergence mean" in render_markdown(report)
    write_report(report, tmp_path)
    assert "Loss of accuracy by quantization" in (tmp_path / "report.html").read_text()


def test_a_text_gives_perplexities(quantized: Quantized, small: Small, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("t3 t5 t1 t4 t1 t5 t9 t2 t6 " * 20)
    result = run(
        *("--graph", quantized("llama", FOUR), "--reference", small("llama"), "--text", text, "--json"),
    )
    cost = json.loads(result.stdout)["quantization"]["cost"]
    assert result.exit_code == 0
    assert cost["tokens"] == 180 and cost["source"] == "text"
    assert cost["perplexity"]["ratio"] == pytest.approx(cost["perplexity"]["graph"] / cost["perplexity"]["model"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "said"),
    [(("--max-divergence", "1e-9"), "limit 1e-09"), (("--min-agreement", "1"), "limit 1")],
)
def test_a_limit_exceeded_is_a_failure(option: tuple[str, str], said: str, quantized: Quantized, small: Small) -> None:
    result = run("--graph", quantized("llama", FOUR), "--reference", small("llama"), *option)
    assert result.exit_code == 1
    assert f"FAILED | cost of quantization | {quantized('llama', FOUR).name}" in result.stdout
    assert said in result.stdout


@pytest.mark.slow
def test_limits_that_hold_give_a_check_that_passes(quantized: Quantized, small: Small) -> None:
    options = ("--max-divergence", "1", "--min-agreement", "0.1")
    result = run("--graph", quantized("llama", FOUR), "--reference", small("llama"), *options)
    assert result.exit_code == 0
    assert "PASSED | cost of quantization" in result.stdout


def test_the_options_of_the_cost_are_for_quantized_graphs(small: Small) -> None:
    result = run(small("llama"), "--max-divergence", "1")
    assert result.exit_code == 2 and "apply to quantized weights and caches only" in result.stderr


def test_a_text_without_a_tokenizer_is_refused(quantized: Quantized, small: Small, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((small("llama") / name).read_bytes())
    (tmp_path / "text.txt").write_text("a b c")
    with pytest.raises(InputRefused, match="has no tokenizer"):
        verify_graphs([quantized("llama", FOUR)], reference=tmp_path, scenario=ONE, text=tmp_path / "text.txt")


@pytest.mark.slow
def test_a_folder_whose_graph_was_quantized_in_place_is_compared_with_its_own_weights(
    small: Small, quantized: Quantized, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "llmconv.json"):
        (folder / name).write_bytes((small("llama") / name).read_bytes())
    (folder / "model.onnx").write_bytes(quantized("llama", FOUR).read_bytes())
    report = verify(folder, scenario=["prefill, 7 tokens"])
    assert report.quantization is not None and report.quantization.weights
    assert {check.name for check in report.checks if check.verdict != "pass"} <= {"graph file"}


def test_unknown_weights_leave_correctness_open_and_the_cost_known(
    quantized: Quantized, small: Small, full: Callable[[str], Eager], tmp_path: Path
) -> None:
    model = onnx.load(quantized("llama", FOUR))
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(64, dtype=np.int32) // 32, "groups"))
    node.input.extend(["", "groups"])
    onnx.save(model, tmp_path / "odd.onnx")
    report = verify_graphs([tmp_path / "odd.onnx"], reference=small("llama"), eager=full("llama"), scenario=ONE)
    assert report.verdict == "inconclusive"
    assert any("has reordered groups" in check.detail for check in report.checks if check.verdict == "skip")
    assert report.quantization is not None and report.quantization.cost is not None


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "gemma2"])
def test_all_scenarios_pass(
    model_type: str, quantizer: str, quantized: Quantized, small: Small, full: Callable[[str], Eager]
) -> None:
    report = verify_graphs([quantized(model_type, quantizer)], reference=small(model_type), eager=full(model_type))
    assert report.verdict == "pass", report.lines()
    assert any("louder weights" in check.name for check in report.checks)


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("mutant", QUANTIZED_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_of_weights_fails(
    mutant: QuantizedMutant, quantized: Quantized, small: Small, full: Callable[[str], Eager], tmp_path: Path
) -> None:
    model = onnx.load(quantized("llama", mutant.of))
    mutant.edit(model)
    onnx.save(model, tmp_path / "mutant.onnx")
    report = verify_graphs([tmp_path / "mutant.onnx"], reference=small("llama"), eager=full("llama"), scenario=ONE)
    assert report.verdict == "fail"


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("quantizer", [FOUR, INT8, "4 bits, QDQ", LEVEL])
@pytest.mark.parametrize(
    "name",
    [
        "one norm's epsilon times ten",
        "attention scale 1 % off in one layer",
        "activation in another form",
        "causal mask too wide",
        "padding ignored",
        "positions off by one",
        "rotary table in half precision",
        "two pasts swapped",
        "second side of a residual dropped",
    ],
)
def test_a_fault_of_the_graph_is_found_in_quantized_graphs(
    name: str, quantizer: str, exported: Small, full: Callable[[str], Eager], tmp_path: Path
) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    folder = exported("llama")
    model = onnx.load(folder / "decode.onnx")
    assert mutant.apply(model, folder)
    onnx.save(model, tmp_path / "broken.onnx")
    plain = quantizable(tmp_path / "broken.onnx", tmp_path / "plain.onnx")
    graph = QUANTIZERS[quantizer](plain, tmp_path / "quantized.onnx")
    report = verify_graphs([graph], reference=folder)
    assert report.verdict == "fail"
    assert all(check.verdict == "pass" for check in report.checks if check.name == "weights")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("shared_embeddings=true",)])
def test_a_graph_of_the_genai_builder_at_four_bits_passes(options: tuple[str, ...], tmp_path: Path) -> None:
    if not (environments.folder("builders") / "complete").exists():
        pytest.skip("the environment of the builders is not there")
    model = save_tiny("llama", tmp_path / "model", **{**MODELS["llama"], "tie_word_embeddings": bool(options)})
    add_tokenizer(model)
    build = command(GENAI, model, tmp_path / "graph")
    build[build.index("fp32")] = "int4"
    subprocess.run([*build, *(["--extra_options", *options] if options else [])], check=True, capture_output=True)
    report = verify_graphs([tmp_path / "graph/model.onnx"], reference=model)
    assert report.verdict == "pass", report.lines()
    assert report.quantization is not None and report.quantization.rounded == ["MatMulNBits"]
    assert len(report.quantization.weights) == 22 + bool(options)
