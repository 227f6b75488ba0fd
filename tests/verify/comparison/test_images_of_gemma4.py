"""Gemma 4: tokens of one image see each other in layers with a window; wrong masks, places and towers fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.errors import UnsupportedInput
from llmconv.export import export
from llmconv.output.manifest import VISION
from llmconv.verify import verify
from llmconv.verify.reference.eager import Eager
from tests.builders.image_checks import Change, judged, mutant
from tests.builders.mutants.surgery import add_constant, attribute, initializer, insert, users
from tests.builders.seeing_gemma4 import save_gemma4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 4 with its graphs."""
    folder = save_gemma4(tmp_path_factory.mktemp("seeing") / "gemma4")
    export(folder, embeds=True)
    return folder


@pytest.fixture(scope="module")
def eager(folder: Path) -> Eager:
    """Its reference."""
    return Eager(folder, "float32")


@pytest.mark.slow
def test_a_correct_export_passes_up_to_the_logits(folder: Path, eager: Eager) -> None:
    features, answers = judged(folder, eager)
    assert {check.verdict for check in (features, *answers)} == {"pass"}
    assert {"logits", "present.1.value"} <= {check.output for check in answers}


def _same(model: onnx.ModelProto) -> onnx.NodeProto:
    """The node that is true for two tokens of one image."""
    equal = next(node for node in users(model, "Equal") if "GatherND" in node.input[0])
    return next(node for node in users(model, "And") if equal.output[0] in node.input)


def causal(model: onnx.ModelProto) -> None:
    """Tokens of an image attend only to earlier tokens."""
    _same(model).input[1] = add_constant(model, np.array(False))


def in_every_layer(model: onnx.ModelProto) -> None:
    """Tokens of an image see each other in layers without a window, too, as in Gemma 3."""
    same = _same(model).output[0]
    masks = list(dict.fromkeys(node.input[3] for node in users(model, "Attention")))
    assert len(masks) == 2
    for node in users(model, "Attention"):
        if node.input[3] == masks[1]:
            zero = add_constant(model, np.zeros((), np.float32))
            node.input[3] = insert(model, node, "Where", [same, zero, masks[1]])


@pytest.mark.slow
@pytest.mark.parametrize("change", [causal, in_every_layer])
def test_a_wrong_mask_fails(folder: Path, eager: Eager, tmp_path: Path, change: Change) -> None:
    features, answers = judged(mutant(folder, tmp_path, "prefill.onnx", change), eager)
    assert features.verdict == "pass"
    assert next(check.verdict for check in answers if check.output == "logits") == "fail"


def swapped_weight(model: onnx.ModelProto) -> None:
    """Queries of layer 3 are computed with the matrix of keys."""
    first, second = (f"vision_tower.encoder.layers.3.self_attn.{part}_proj.linear.weight" for part in "qk")
    named = {tensor.name.removeprefix("model."): tensor for tensor in model.graph.initializer}
    named[first].external_data[1].value = named[second].external_data[1].value


def exact_gelu(model: onnx.ModelProto) -> None:
    """One GELU of the tower is exact, and not the approximation by tanh."""
    node = next(one for one in users(model, "Gelu") if "layers.2.mlp" in one.input[0])
    found = attribute(node, "approximate")
    assert found
    node.attribute.remove(found)


def swapped_places(model: onnx.ModelProto) -> None:
    """Columns are rows."""
    first = next(node for node in model.graph.node if "image_position_ids" in node.input)
    axis = add_constant(model, np.array([1, 0]))
    swapped = insert(model, first, "Gather", ["image_position_ids", axis])
    made = next(node for node in model.graph.node if swapped in node.output)
    made.attribute.append(onnx.helper.make_attribute("axis", 2))
    for node in model.graph.node:
        if node is not made and node != made:
            for at, name in enumerate(node.input):
                if name == "image_position_ids":
                    node.input[at] = swapped


def no_clipping(model: onnx.ModelProto) -> None:
    """The inputs of one linear layer are not clipped."""
    tensor = next(one for one in model.graph.initializer if one.name.endswith("layers.1.mlp.up_proj.input_max"))
    assert initializer(model, tensor.name)
    large = add_constant(model, np.float32(1e6))
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name == tensor.name:
                node.input[at] = large


@pytest.mark.slow
@pytest.mark.parametrize("change", [swapped_weight, exact_gelu, swapped_places, no_clipping])
def test_a_wrong_tower_fails(folder: Path, eager: Eager, tmp_path: Path, change: Change) -> None:
    features, answers = judged(mutant(folder, tmp_path, VISION, change), eager)
    assert features.verdict == "fail"
    assert next(check.verdict for check in answers if check.output == "logits") == "fail"


def test_a_model_with_embeddings_per_layer_takes_tokens(tmp_path: Path) -> None:
    small = save_gemma4(tmp_path / "small", hidden_size_per_layer_input=16, vocab_size_per_layer_input=96)
    with pytest.raises(UnsupportedInput, match="every layer of this model also embeds the tokens"):
        export(small, embeds=True)


@pytest.mark.slow
def test_verify_judges_graphs_with_images_and_those_of_tokens(folder: Path, tmp_path: Path) -> None:
    report = verify(folder)
    assert report.verdict == "pass", report.closing_lines()
    assert {"features of images", "prompts with images"} <= {check.name for check in report.checks}
    made = export(folder, tmp_path / "tokens")
    assert "vision" not in made.graphs
    names = {port.name for port in onnx.load(made.folder / "decode.onnx", load_external_data=False).graph.input}
    assert {"input_ids"} <= names and "mm_token_type_ids" not in names
    report = verify(made.folder)
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.slow
def test_a_model_whose_images_are_read_like_text_passes(tmp_path: Path) -> None:
    made = export(save_gemma4(tmp_path / "causal", use_bidirectional_attention=None), embeds=True)
    report = verify(made.folder)
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.slow
def test_float16_passes(folder: Path, tmp_path: Path) -> None:
    report = verify(export(folder, tmp_path / "half", embeds=True, precision="float16").folder)
    assert report.verdict == "pass", report.closing_lines()
