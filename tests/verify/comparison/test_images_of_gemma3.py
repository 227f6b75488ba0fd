"""Gemma 3: tokens of one image see each other, in the window of sliding layers; wrong masks and towers fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.export import export
from llmconv.export.export_options import ExportOptions
from llmconv.output.manifest import VISION
from llmconv.verify import verify
from llmconv.verify.reference.eager import Eager
from tests.builders.image_checks import Change, judged, mutant, no_positions, node_of, swapped_weight
from tests.builders.mutants.surgery import add_constant, attribute, replace_input, users
from tests.builders.seeing_gemma import save_gemma3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 with its graphs."""
    folder = save_gemma3(tmp_path_factory.mktemp("seeing") / "gemma3")
    export(folder)
    return folder


@pytest.fixture(scope="module")
def eager(folder: Path) -> Eager:
    """Its reference."""
    from llmconv.export.families import extra_inputs_of  # noqa: PLC0415 - imports transformers

    assert [extra.name for extra in extra_inputs_of(folder)] == ["token_type_ids"]
    return Eager(folder, "float32")


@pytest.mark.slow
def test_a_correct_export_passes_up_to_the_logits(folder: Path, eager: Eager) -> None:
    features, answers = judged(folder, eager)
    assert {check.verdict for check in (features, *answers)} == {"pass"}
    assert {"logits", "present.1.value"} <= {check.output for check in answers}


def _blocks(model: onnx.ModelProto) -> onnx.NodeProto:
    """The node that compares the blocks of query and key."""
    return next(
        node for node in users(model, "Equal") if all("GatherND" in one or "Where" in one for one in node.input)
    )


def _same(model: onnx.ModelProto) -> onnx.NodeProto:
    """The node that is true for two tokens of one image."""
    equal = _blocks(model).output[0]
    return next(node for node in users(model, "And") if equal in node.input)


def causal(model: onnx.ModelProto) -> None:
    """Tokens of an image attend only to earlier tokens."""
    node = _same(model)
    node.input[1] = add_constant(model, np.array(False))


def one_block(model: onnx.ModelProto) -> None:
    """All images together are one block."""
    node = _blocks(model)
    node.op_type, node.output[0] = "LessOrEqual", node.output[0]


def everything_sees_images(model: onnx.ModelProto) -> None:
    """Tokens of text see all tokens of text, as if they were one image."""
    node = _same(model)
    node.input[1] = add_constant(model, np.array(True))


def outside_the_window(model: onnx.ModelProto) -> None:
    """In sliding layers, a token sees its image beyond the window."""
    same = _same(model).output[0]
    cut = next(node.output[0] for node in users(model, "Greater") if "Sub" in node.input[1])
    window = next(node for node in users(model, "And") if cut in node.input)
    wide = next(at for at, node in enumerate(model.graph.node) if node == window)
    made = f"{window.output[0]}_or_same"
    for node in model.graph.node:
        replace_input(node, window.output[0], made)
    model.graph.node.insert(wide + 1, onnx.helper.make_node("Or", [window.output[0], same], [made], name=made))


def beyond_the_image(model: onnx.ModelProto) -> None:
    """The first token of an image does not belong to it."""
    node = next(one for one in users(model, "Where") if any("CumSum" in name for name in one.input))
    starts = next(one for one in users(model, "And") if any("Not" in name for name in one.input))
    node.input[0] = next(name for name in starts.input if "Not" in name)


@pytest.mark.slow
@pytest.mark.parametrize("change", [causal, one_block, everything_sees_images, beyond_the_image, outside_the_window])
def test_a_wrong_mask_fails(folder: Path, eager: Eager, tmp_path: Path, change: Change) -> None:
    features, answers = judged(mutant(folder, tmp_path, "prefill.onnx", change), eager)
    assert features.verdict == "pass"
    assert next(check.verdict for check in answers if check.output == "logits") == "fail"


def exact_gelu(model: onnx.ModelProto) -> None:
    """One GELU of the tower is exact, and not the approximation by tanh."""
    node = node_of(model, "Gelu", "layers.2.mlp")
    found = attribute(node, "approximate")
    assert found
    node.attribute.remove(found)


def pooled_by_maximum(model: onnx.ModelProto) -> None:
    """Patches are pooled by their maximum."""
    (node,) = users(model, "AveragePool")
    node.op_type = "MaxPool"
    found = attribute(node, "count_include_pad")
    if found:
        node.attribute.remove(found)


@pytest.mark.slow
@pytest.mark.parametrize("change", [swapped_weight, exact_gelu, no_positions, pooled_by_maximum])
def test_a_wrong_tower_fails(folder: Path, eager: Eager, tmp_path: Path, change: Change) -> None:
    features, answers = judged(mutant(folder, tmp_path, VISION, change), eager)
    assert features.verdict == "fail"
    assert next(check.verdict for check in answers if check.output == "logits") == "fail"


@pytest.mark.slow
def test_verify_judges_images_and_values_of_the_input(folder: Path, tmp_path: Path) -> None:
    report = verify(folder)
    assert report.verdict == "pass", report.closing_lines()
    names = {check.name for check in report.checks}
    assert {"features of images", "prompts with images", "first and last values of extra inputs"} <= names
    wrong = mutant(folder, tmp_path, "prefill.onnx", causal)
    report = verify(wrong, allow_changed=True)
    failed = {check.name for check in report.checks if check.verdict == "fail"}
    assert {"prompts with images", "first and last values of extra inputs"} <= failed


OTHERS: list[ExportOptions] = [
    {"precision": "float16"},
    {"quant": "int8"},
    {"shapes": "static", "max_seq_len": 32, "prompt_len": 16, "batch_size": 2},
    {"cache": "shared-buffer"},
    {"target": "ort-cpu"},
]


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("options", OTHERS, ids=[next(iter(options)) for options in OTHERS])
def test_other_exports_pass(folder: Path, tmp_path: Path, options: ExportOptions) -> None:
    made = export(folder, tmp_path / "other", **options)
    report = verify(made.folder, reference=folder if "quant" in options else None)
    assert report.verdict == "pass", report.closing_lines()
    found = {check.graph for check in report.checks if check.name == "prompts with images" and check.verdict == "pass"}
    assert "prefill.onnx" in found
