"""Graphs in half precision are compared unchanged and as float32 copies."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmconv.verify import Report, verify_graphs
from llmconv.verify.comparison.half_precision import IN_FLOAT32, ROUNDED, KnownConstants, widen
from llmconv.verify.reference.eager import Eager
from tests.builders.half_precision import round_weights, to_half
from tests.builders.mutants.mutants import MUTANTS, VOID_IN, Mutant
from tests.builders.other_exporters import changed, export_by_transformers
from tools.half_precision_runs import half_mutant

Tiny = Callable[[str], Path]
ONE = ("prefill, 7 tokens",)
EPSILON = next(mutant for mutant in MUTANTS if mutant.name == "one norm's epsilon times ten")


@pytest.fixture(scope="session")
def rounded(exported: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`rounded(model_type, dtype)` is an exported folder with rounded weights; do not write into it."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(model_type: str, dtype: str) -> Path:
        if (model_type, dtype) not in folders:
            target = tmp_path_factory.mktemp("rounded") / model_type
            shutil.copytree(exported(model_type), target)
            round_weights(target, dtype)
            folders[model_type, dtype] = target
        return folders[model_type, dtype]

    return folder


@pytest.fixture(scope="session")
def half_eager(rounded: Callable[[str, str], Path]) -> Callable[[str, str], Eager]:
    """`half_eager(model_type, dtype)` is the reference; it computes every scenario once."""
    references: dict[tuple[str, str], Eager] = {}

    def reference(model_type: str, dtype: str) -> Eager:
        if (model_type, dtype) not in references:
            references[model_type, dtype] = Eager(rounded(model_type, dtype), dtype, keep=True)
        return references[model_type, dtype]

    return reference


@pytest.fixture
def half(rounded: Callable[[str, str], Path], tmp_path: Path) -> Callable[[str, str], Path]:
    """`half(model_type, dtype)` is the decode graph in that precision."""
    return lambda model_type, dtype: to_half(
        rounded(model_type, dtype) / "decode.onnx", tmp_path / f"{model_type}-{dtype}" / "decode.onnx", dtype
    )


@pytest.fixture
def check(half_eager: Callable[[str, str], Eager]) -> Callable[..., Report]:
    """`check(path, dtype)` compares a graph with the tiny llama in one scenario."""

    def compare(path: Path, dtype: str = "float16", model_type: str = "llama", only: tuple[str, ...] = ONE) -> Report:
        eager = half_eager(model_type, dtype)
        return verify_graphs([path], reference=eager.folder, eager=eager, scenario=only)

    return compare


def failed(report: Report) -> tuple[bool, bool]:
    """Whether outputs of the graph differ, and of its float32 copy."""
    found = [check for check in report.checks if check.output and check.verdict == "fail"]
    wide = [check for check in found if check.name.endswith(IN_FLOAT32)]
    return len(wide) < len(found), bool(wide)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_half_precision_graph_passes_unchanged_and_as_a_float32_copy(
    dtype: str, half: Callable[[str, str], Path], check: Callable[..., Report]
) -> None:
    report = check(half("llama", dtype), dtype)
    assert report.verdict == "pass"
    assert {ONE[0], f"{ONE[0]}{IN_FLOAT32}"} <= {found.name for found in report.checks}
    assert any("louder weights, in float32" in found.name for found in report.checks)
    assert any(f"computes in {dtype}" in note for note in report.notes)


def test_bfloat16_is_reported_as_emulated(half: Callable[[str, str], Path], check: Callable[..., Report]) -> None:
    assert any("no bfloat16 kernels" in note for note in check(half("llama", "bfloat16"), "bfloat16").notes)


@pytest.mark.slow
def test_a_float32_graph_has_no_float32_copy(exported: Tiny, eager: Callable[[str], Eager]) -> None:
    report = verify_graphs(
        [exported("llama") / "decode.onnx"], reference=exported("llama"), eager=eager("llama"), scenario=ONE
    )
    assert not any(check.name.endswith(IN_FLOAT32) for check in report.checks)


@pytest.mark.slow
def test_the_copy_shows_an_epsilon_that_half_precision_hides(
    rounded: Callable[[str, str], Path], check: Callable[..., Report], tmp_path: Path
) -> None:
    report = check(half_mutant(EPSILON, rounded("llama", "float16"), tmp_path / "mutant", "float16"))
    assert failed(report) == (False, True)
    assert report.verdict == "fail"
    assert report.where is not None and EPSILON.is_at(report.where.layer, 4)


def test_half_precision_shows_an_overflow_that_the_copy_hides(
    half: Callable[[str, str], Path], check: Callable[..., Report], tmp_path: Path
) -> None:
    report = check(changed(half("llama", "float16"), tmp_path / "large.onnx", overflow))
    assert failed(report) == (True, False)
    assert {found.name for found in report.checks if found.verdict == "fail"} == {f"{ONE[0]}{ROUNDED}"}


def overflow(model: onnx.ModelProto) -> None:
    """Logits a million times as large, and divided again."""
    large = numpy_helper.from_array(np.array(32768, dtype=np.float16), "large")
    model.graph.initializer.append(large)
    last = next(node for node in model.graph.node if "logits" in node.output)
    last.output[:] = ["plain"]
    values = ["plain", "first", "second", "third", "logits"]
    for at, op in enumerate(("Mul", "Mul", "Div", "Div")):
        model.graph.node.append(helper.make_node(op, [values[at], "large"], [values[at + 1]], name=f"large/{at}"))


@pytest.mark.slow
def test_a_float32_folder_is_rounded_as_the_graph_is(exported: Tiny, tmp_path: Path) -> None:
    graph = to_half(exported("llama") / "decode.onnx", tmp_path / "decode.onnx", "float16")
    report = verify_graphs([graph], reference=exported("llama"), scenario=ONE)
    assert report.verdict == "pass"
    assert "are the model's by content" in next(check.detail for check in report.checks if check.name == "weights")


def test_an_unknown_table_in_half_precision_prevents_the_copy_and_is_reported(
    half: Callable[[str, str], Path], check: Callable[..., Report], tmp_path: Path
) -> None:
    def add(model: onnx.ModelProto) -> None:
        values = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(values, "odd_table"))

    report = check(changed(half("llama", "float16"), tmp_path / "table.onnx", add))
    assert any(
        found.verdict == "skip" and "the content of `odd_table` (float16) is unknown" in found.detail
        for found in report.checks
    )


def test_the_copy_keeps_casts_to_the_other_half_precision() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["low"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["low"], ["y"], to=TensorProto.FLOAT16),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2]) for name in ("x", "y")]
    model = helper.make_model(helper.make_graph(nodes, "g", ports[:1], ports[1:]))
    widen(model, TensorProto.FLOAT16, KnownConstants(), ())
    assert [node.attribute[0].i for node in model.graph.node] == [TensorProto.BFLOAT16, TensorProto.FLOAT]
    assert {port.type.tensor_type.elem_type for port in [*model.graph.input, *model.graph.output]} == {
        TensorProto.FLOAT
    }


def home(mutant: Mutant) -> str:
    """The family on which a mutant is tried."""
    return next(name for name in ("llama", "gemma2", "gpt2", "bloom") if name in mutant.families)


REAL = [mutant for mutant in MUTANTS if mutant.name not in VOID_IN["float16"]]


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("mutant", REAL, ids=lambda mutant: mutant.name)
def test_every_kind_of_mutant_is_caught_in_float16(
    mutant: Mutant,
    rounded: Callable[[str, str], Path],
    half_eager: Callable[[str, str], Eager],
    tmp_path: Path,
) -> None:
    folder, eager = rounded(home(mutant), "float16"), half_eager(home(mutant), "float16")
    graph = half_mutant(mutant, folder, tmp_path / "mutant", "float16")
    assert verify_graphs([graph], reference=folder, eager=eager).verdict == "fail"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model_type", ["gemma2", "gpt2"])
def test_half_precision_graphs_of_transformers_pass(model_type: str, dtype: str, tiny: Tiny, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        graphs = export_by_transformers(tiny(model_type), tmp_path, dtype)
    report = verify_graphs(graphs, reference=tiny(model_type))
    assert report.verdict == "pass", report.closing_lines()
    assert any(check.name.endswith(IN_FLOAT32) for check in report.checks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
def test_all_scenarios_pass_in_half_precision(
    model_type: str, dtype: str, half: Callable[[str, str], Path], check: Callable[..., Report]
) -> None:
    report = check(half(model_type, dtype), dtype, model_type, ())
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.slow
def test_bisect_names_the_node_in_the_float32_copy(rounded: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = rounded("llama", "float16")
    graph = half_mutant(EPSILON, folder, tmp_path / "mutant", "float16")
    report = verify_graphs([graph], reference=folder, scenario=ONE, bisect=True)
    assert report.where is not None
    assert "epsilon" in report.where.finding
    assert "layers.1.input_layernorm" in report.where.scope


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_garbage_under_the_mask_does_not_overflow_in_float16(
    model_type: str, half: Callable[[str, str], Path], check: Callable[..., Report]
) -> None:
    report = check(half(model_type, "float16"), "float16", model_type, ("garbage under the mask",))
    assert report.verdict == "pass", report.closing_lines()
