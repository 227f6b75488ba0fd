"""Towers of tiles and of images of any size: correct ones pass up to the logits, wrong ones fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.export import export
from llmconv.output.manifest import VISION
from llmconv.runtime.images import families
from llmconv.runtime.images.families import family_in
from llmconv.runtime.onnxruntime.graph import OrtGraph, VisionGraph
from llmconv.tensors import Array
from llmconv.verify import verify
from llmconv.verify.comparison.images import ImageChecks
from llmconv.verify.reference.eager import Eager
from llmconv.verify.sigma import GATES
from tests.builders.mutants.surgery import add_constant, attribute, constant_value, initializer, users, weight_names
from tests.builders.slow_rows import slow_but
from tests.builders.tiled import CONFIGS, save_tiled


@dataclass(frozen=True)
class Seen:
    """A model with its graphs, and its reference."""

    model_type: str
    folder: Path
    eager: Eager


@pytest.fixture(scope="module", params=slow_but(CONFIGS, "idefics3"))
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A model of each family."""
    folder = tmp_path_factory.mktemp("tiled") / request.param
    save_tiled(request.param, folder)
    export(folder, incremental=True)
    return Seen(request.param, folder, Eager(folder, "float32"))


def checks(path: Path, eager: Eager) -> ImageChecks:
    family = family_in(eager.folder)
    assert family
    return ImageChecks(VisionGraph(path), family, eager, GATES["float32"])


@pytest.mark.one_row_in(2)
@pytest.mark.slow
def test_a_correct_tower_passes_up_to_the_logits(seen: Seen) -> None:
    found = checks(seen.folder / VISION, seen.eager)
    made = [found.features(), *found.answers(OrtGraph(seen.folder / "decode.onnx"))]
    assert {check.verdict for check in made} == {"pass"}, made
    assert {"image_features", "logits", "present.0.key"} <= {check.output for check in made}


def swapped_weights(model: onnx.ModelProto) -> None:
    """Queries of layer 1 are computed with the matrix of keys."""
    for name in weight_names(model, r"layers\.1\..*q_proj\.weight$"):
        one, other = initializer(model, name), initializer(model, name.replace("q_proj", "k_proj"))
        assert one and other
        one.external_data[1].value = other.external_data[1].value


def other_gelu(model: onnx.ModelProto) -> None:
    """The last GELU is the approximation, or is not."""
    node = users(model, "Gelu")[-1]
    found = attribute(node, "approximate")
    kind = "none" if found and found.s == b"tanh" else "tanh"
    if found:
        node.attribute.remove(found)
    node.attribute.append(onnx.helper.make_attribute("approximate", kind))


def softmax_of_queries(model: onnx.ModelProto) -> None:
    """In the last layer the weights of each key sum to 1, not those of each query."""
    node = users(model, "Softmax")[-1]
    found = attribute(node, "axis")
    if found:
        node.attribute.remove(found)
    node.attribute.append(onnx.helper.make_attribute("axis", -2))


def reversed_positions(model: onnx.ModelProto) -> None:
    """The patches have the positions in reverse order."""
    node = next(node for node in users(model, "Gather") if "position_embedding" in node.name)
    positions = constant_value(model, node.input[1])
    assert positions is not None
    node.input[1] = add_constant(model, positions[:, ::-1].copy())


def rows_for_columns(model: onnx.ModelProto) -> None:
    """The cosines of columns are those of rows."""
    rows, columns = (node for node in users(model, "Gather") if "graph/Split:" in node.input[0])
    columns.input[1] = rows.input[1]


def half_a_newline(model: onnx.ModelProto) -> None:
    """The vector that ends a row is halved."""
    node = users(model, "Unsqueeze")[-1]
    made = node.output[0]
    node.output[0] = "whole"
    model.graph.node.append(onnx.helper.make_node("Mul", ["whole", add_constant(model, np.float32(0.5))], [made]))


def turned_back(model: onnx.ModelProto) -> None:
    """The real part of a product of complex numbers is a sum."""
    node = next(node for node in users(model, "Sub") if "self_attn" in node.name)
    node.op_type = "Add"


COMMON = (swapped_weights, other_gelu, softmax_of_queries)
PARTICULAR = {
    "idefics3": (reversed_positions,),
    "smolvlm": (reversed_positions,),
    "llama4": (turned_back,),
    "llava_next": (reversed_positions, half_a_newline),
    "llava_onevision": (reversed_positions, half_a_newline),
    "mistral3": (rows_for_columns,),
}


@pytest.mark.one_row_in(2)
@pytest.mark.slow
def test_a_wrong_tower_fails(seen: Seen, tmp_path: Path) -> None:
    graph = OrtGraph(seen.folder / "decode.onnx")
    for change in (*COMMON, *PARTICULAR[seen.model_type]):
        home = Path(shutil.copytree(seen.folder, tmp_path / change.__name__))
        model = onnx.load(home / VISION, load_external_data=False)
        change(model)
        onnx.save(model, home / VISION)
        found = checks(home / VISION, seen.eager)
        assert found.features().verdict == "fail", change
        logits = next(check for check in found.answers(graph) if check.output == "logits")
        assert logits.verdict == "fail", change


def nearest(features: Array, height: int, width: int) -> Array:
    """Features resized without weights."""
    rows, columns = (np.arange(new) * old // new for new, old in zip((height, width), features.shape, strict=False))
    return np.asarray(features[rows][:, columns])


PACKINGS: dict[str, tuple[str, Callable[..., object]]] = {
    "not unpadded": ("unpadded", lambda grid, size: (slice(None), slice(None))),
    "another grid": ("best_resolution", lambda size, grids: (12, 24)),
    "nearest": ("resize_bilinear", nearest),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKINGS)
def test_features_that_are_packed_in_another_way_fail(seen: Seen, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (seen.model_type == "llava_onevision" or (seen.model_type == "llava_next" and name != "nearest")):
        pytest.skip("this family packs nothing so")
    right = checks(seen.folder / VISION, seen.eager)
    examples = right._examples(0)
    monkeypatch.setattr(right.__class__, "_examples", lambda self, seed: examples)
    monkeypatch.setattr(families, *PACKINGS[name])
    assert right.features().verdict == "fail"


@pytest.mark.slow
def test_verify_judges_the_tower_and_prompts_with_images(seen: Seen) -> None:
    report = verify(seen.folder)
    assert report.verdict == "pass", report.closing_lines()
    assert {"features of images", "prompts with images"} <= {check.name for check in report.checks}


@pytest.mark.one_row_in(4)
@pytest.mark.slow
def test_half_precision_passes(seen: Seen, tmp_path: Path) -> None:
    made = export(seen.folder, tmp_path / "half", precision="float16", incremental=True)
    report = verify(made.folder)
    assert report.verdict == "pass", report.closing_lines()
    assert any(check.graph == VISION and check.output == "image_features" for check in report.checks)
