"""The vision tower: wrong towers fail, correct ones pass, up to the logits of prompts with images."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.convert import inspect
from llmconv.export import export
from llmconv.export.export_options import ExportOptions
from llmconv.output.manifest import VISION
from llmconv.verify import verify
from llmconv.verify.reference.eager import Eager
from tests.builders.image_checks import Change, judged, mutant, no_positions, node_of, swapped_weight
from tests.builders.mutants.surgery import add_constant, attribute, insert, users
from tests.builders.seeing import save_seeing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA with its graphs."""
    folder = save_seeing(tmp_path_factory.mktemp("seeing") / "llava")
    export(folder)
    return folder


@pytest.fixture(scope="module")
def eager(folder: Path) -> Eager:
    """Its reference."""
    return Eager(folder, "float32")


def test_a_correct_tower_passes_up_to_the_logits(folder: Path, eager: Eager) -> None:
    features, answers = judged(folder, eager)
    made = [features, *answers]
    assert {check.verdict for check in made} == {"pass"}
    assert {"image_features", "logits", "present.0.key"} <= {check.output for check in made}


@pytest.mark.slow
def test_the_recorded_verdict_is_one_on_the_tower_unless_it_was_skipped(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "llava"))
    verify(copied, scenario=("left padding",))
    assert VISION in inspect(copied).summary()["verified"]["graphs"]
    verify(copied, scenario=("left padding",), low_memory=True)
    assert VISION in inspect(copied).summary()["verified"]["unjudged"]


def wrong_activation(model: onnx.ModelProto) -> None:
    """The tower's GELU has another factor."""
    node = node_of(model, "Mul", "layers.2.mlp.activation_fn/Mul:0")
    node.input[1] = add_constant(model, np.float32(1.6))


def tanh_projector(model: onnx.ModelProto) -> None:
    """The projector's GELU is the approximation by tanh."""
    (node,) = users(model, "Gelu")
    found = attribute(node, "approximate")
    if found:
        node.attribute.remove(found)
    node.attribute.append(onnx.helper.make_attribute("approximate", "tanh"))


def reversed_patches(model: onnx.ModelProto) -> None:
    """The patches come in reverse order."""
    node = next(n for n in users(model, "Concat") if any("embeddings/Expand" in one for one in n.input))
    patches = node.input[1]
    order = add_constant(model, np.arange(4)[::-1].copy())
    new = insert(model, node, "Gather", [patches, order])
    made = next(n for n in model.graph.node if new in n.output)
    made.attribute.append(onnx.helper.make_attribute("axis", 1))
    node.input[1] = new


def with_class_token(model: onnx.ModelProto) -> None:
    """The features begin at the class token instead of the first patch."""
    (node,) = users(model, "Slice")
    node.input[1], node.input[2] = (add_constant(model, np.array([at])) for at in (0, 4))


MUTANTS = (swapped_weight, wrong_activation, tanh_projector, no_positions, reversed_patches, with_class_token)


@pytest.mark.slow
@pytest.mark.parametrize("change", MUTANTS, ids=lambda change: change.__name__)
def test_a_wrong_tower_fails(folder: Path, eager: Eager, tmp_path: Path, change: Change) -> None:
    features, answers = judged(mutant(folder, tmp_path, VISION, change), eager)
    assert features.verdict == "fail"
    assert next(check.verdict for check in answers if check.output == "logits") == "fail"


@pytest.mark.slow
def test_verify_judges_the_tower_and_prompts_with_images(folder: Path, tmp_path: Path) -> None:
    report = verify(folder)
    assert report.verdict == "pass", report.closing_lines()
    names = {check.name for check in report.checks}
    assert {"features of images", "prompts with images", "own embeddings"} <= names
    home = Path(shutil.copytree(folder, tmp_path / "mutant"))
    model = onnx.load(home / VISION, load_external_data=False)
    tanh_projector(model)
    onnx.save(model, home / VISION)
    assert verify(home).verdict == "fail"  # changed since the export
    report = verify(home, allow_changed=True)
    assert [check.graph for check in report.checks if check.verdict == "fail" and check.graph == VISION]


OTHERS: list[ExportOptions] = [
    {"precision": "float16"},
    {"quant": "int8"},
    {"shapes": "static", "max_seq_len": 32, "batch_size": 2},
]


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("options", OTHERS, ids=[next(iter(options)) for options in OTHERS])
def test_other_exports_pass(folder: Path, tmp_path: Path, options: ExportOptions) -> None:
    made = export(folder, tmp_path / "other", **options)
    report = verify(made.folder, reference=folder if "quant" in options else None)
    assert report.verdict == "pass", report.closing_lines()
    assert any(check.graph == VISION and check.output == "image_features" for check in report.checks)
