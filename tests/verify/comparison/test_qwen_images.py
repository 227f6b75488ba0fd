"""Qwen2-VL and later: towers for images of any size and positions on three axes; wrong ones fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.errors import UnsupportedInput
from llmconv.export import export
from llmconv.export.families import extra_inputs_of
from llmconv.output.manifest import VISION
from llmconv.runtime.extra_inputs import DEEPSTACK
from llmconv.runtime.images.families import family_in
from llmconv.runtime.images.qwen_vl import CELLS, PATCH_POSITIONS, WINDOW_IDS
from llmconv.runtime.onnxruntime.graph import OrtGraph, VisionGraph
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify import verify
from llmconv.verify.comparison.images import ImageChecks
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Check
from llmconv.verify.sigma import GATES
from tests.builders.mutants.surgery import add_constant, initializer, replace_input
from tests.builders.seeing_qwen import TEXT, save_qwen

Seeing = Callable[[str], Path]

PREFILL = "prefill.onnx"


def checks_of(folder: Path) -> list[Check]:
    """The checks of features, and of answers of the prefill graph."""
    family = family_in(folder)
    assert family
    settings = SessionSettings(extra_inputs=partial(extra_inputs_of, folder))
    checks = ImageChecks(VisionGraph(folder / VISION), family, Eager(folder, "float32"), GATES["float32"])
    return [checks.features(), *checks.answers(OrtGraph(folder / PREFILL, settings))]


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXT)
def test_features_and_answers_equal_the_eager_model(seeing_qwen: Seeing, model_type: str) -> None:
    found = checks_of(seeing_qwen(model_type))
    assert {check.verdict for check in found} == {"pass"}
    assert {"image_features", "logits", "present.3.key"} <= {check.output for check in found}


def _gathered(model: onnx.ModelProto, name: str, order: list[int], axis: int) -> None:
    """The input `name` has other elements along an axis."""
    made = f"{name}_gathered"
    for node in model.graph.node:
        replace_input(node, name, made)
    inputs = [name, add_constant(model, np.array(order))]
    model.graph.node.insert(0, onnx.helper.make_node("Gather", inputs, [made], axis=axis))


def rows_as_columns(model: onnx.ModelProto) -> None:
    """Rotary positions of patches are exchanged."""
    _gathered(model, PATCH_POSITIONS, [1, 0], axis=1)


def no_windows(model: onnx.ModelProto) -> None:
    """All patches are in one window."""
    for node in model.graph.node:
        replace_input(node, WINDOW_IDS, "zeros")
    model.graph.node.insert(0, onnx.helper.make_node("Sub", [WINDOW_IDS, WINDOW_IDS], ["zeros"]))


def cells_exchanged(model: onnx.ModelProto) -> None:
    """Weights of position embeddings belong to other cells."""
    _gathered(model, CELLS, [0, 2, 1, 3], axis=1)


def swapped_weight(model: onnx.ModelProto) -> None:
    """The last layer has a matrix of the layer before."""
    names = [one.name for one in model.graph.initializer]
    ends = [f"visual.blocks.{at}.attn.proj.weight" for at in (4, 3)]
    one, other = (initializer(model, next(name for name in names if name.endswith(end))) for end in ends)
    assert one and other
    one.external_data[1].value = other.external_data[1].value


def axes_exchanged(model: onnx.ModelProto) -> None:
    """Rows of features have the frequencies of columns."""
    _gathered(model, "position_ids", [0, 2, 1], axis=0)


def axes_exchanged_after_a_past(model: onnx.ModelProto) -> None:
    """The same, but for a part of a prompt that continues a cache."""
    axes_exchanged(model)
    key = next(port.name for port in model.graph.input if port.name.endswith(".0.key"))
    for node in model.graph.node:
        replace_input(node, "position_ids_gathered", "of_call")
    empty = add_constant(model, np.array([0]))
    model.graph.node.insert(1, onnx.helper.make_node("Shape", [key], ["past_length"], start=2, end=3))
    model.graph.node.insert(2, onnx.helper.make_node("Equal", ["past_length", empty], ["is_empty"]))
    chosen = ["is_empty", "position_ids", "position_ids_gathered"]
    model.graph.node.insert(3, onnx.helper.make_node("Where", chosen, ["of_call"]))


def one_axis(model: onnx.ModelProto) -> None:
    """All axes have the positions in time."""
    _gathered(model, "position_ids", [0, 0, 0], axis=0)


def no_deepstack(model: onnx.ModelProto) -> None:
    """The first layers get features of the first of them."""
    _gathered(model, DEEPSTACK.name, [*range(64)] * 3, axis=2)


OF_ALL = ((VISION, rows_as_columns), (VISION, swapped_weight), (PREFILL, axes_exchanged), (PREFILL, one_axis))
OWN = {"qwen2_5_vl": ((VISION, no_windows),), "qwen3_vl": ((VISION, cells_exchanged), (PREFILL, no_deepstack))}
OWN["qwen2_vl"] = ((PREFILL, axes_exchanged_after_a_past),)
MUTANTS = [(kind, *one) for kind in OWN for one in (*OF_ALL, *OWN[kind])]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "graph", "change"), MUTANTS, ids=lambda one: getattr(one, "__name__", one))
def test_a_wrong_graph_fails(
    seeing_qwen: Seeing, tmp_path: Path, model_type: str, graph: str, change: Callable[[onnx.ModelProto], None]
) -> None:
    home = Path(shutil.copytree(seeing_qwen(model_type), tmp_path / "mutant"))
    model = onnx.load(home / graph, load_external_data=False)
    change(model)
    onnx.save(model, home / graph)
    features, logits, *_ = checks_of(home)
    assert (features.verdict, logits.verdict) == ("fail" if graph == VISION else "pass", "fail")


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXT)
def test_verify_judges_text_and_images(seeing_qwen: Seeing, model_type: str) -> None:
    report = verify(seeing_qwen(model_type))
    assert report.verdict == "pass", report.closing_lines()
    assert {"features of images", "prompts with images", "own embeddings"} <= {check.name for check in report.checks}


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"precision": "float16"}, {"quant": "int8"}, {"shapes": "static"}], ids=str)
def test_other_exports_pass(seeing_qwen: Seeing, tmp_path: Path, options: dict[str, str]) -> None:
    sizes = {"max_seq_len": 64, "batch_size": 2} if "shapes" in options else {}
    made = export(seeing_qwen("qwen3_vl"), tmp_path / "other", **options, **sizes)  # type: ignore[arg-type]
    report = verify(made.folder, reference=seeing_qwen("qwen3_vl") if "quant" in options else None)
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.slow
def test_tied_embeddings_are_one_matrix(tmp_path: Path) -> None:
    folder = save_qwen(tmp_path / "tied", "qwen2_vl", tie_word_embeddings=True)
    export(folder)
    assert {check.verdict for check in checks_of(folder)} == {"pass"}


@pytest.mark.slow
def test_layer_by_layer_verification_refuses_features_for_layers(seeing_qwen: Seeing) -> None:
    with pytest.raises(UnsupportedInput, match="do not run layer by layer"):
        verify(seeing_qwen("qwen3_vl"), low_memory=True)
