"""Layouts of models with images: what is written for each client, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.export.clients.genai import IMAGE_MODELS
from llmconv.export.clients.image_parts import ImageModel, flatten_features, place_features, take_float32_pixels
from llmconv.export.clients.transformersjs import edits, preprocessor
from llmconv.export.rewrite.pipeline_stages import graph_parts
from llmconv.export.vision_towers import VISION_TOWERS
from llmconv.export.weights import StoredRows
from llmconv.progress import warnings_to
from llmconv.runtime.onnxruntime.session_file import read_genai_config
from tests.builders.seeing import IMAGE_ID, SIZE, TOWERS, save_picture, save_seeing, save_tower

PARTS = ("decoder_model_merged", "embed_tokens", "vision_encoder")
HIDDEN = 3


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A LLaVA with the layouts of both clients in place, and the warnings."""
    folder, warnings = save_seeing(tmp_path_factory.mktemp("image_clients") / "llava"), list[str]()
    with warnings_to(warnings.append):
        export(folder, layout=["genai", "transformersjs"])
    return folder, warnings


@pytest.fixture(scope="module")
def llava(in_place: tuple[Path, list[str]]) -> Path:
    """Its folder; do not write into it."""
    return in_place[0]


@pytest.fixture(scope="module")
def renewed(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a new folder; do not write into it."""
    return export(llava, tmp_path_factory.mktemp("renewed") / "llava", layout="transformersjs").folder


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString())


def graph(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], tensors: list[Any]) -> onnx.ModelProto:
    made = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def embedding_table() -> onnx.ModelProto:
    """Token t has the embedding [t, t, t]; the placeholder is 7."""
    rows = helper.make_tensor("table", TensorProto.FLOAT, [9, HIDDEN], np.repeat(np.arange(9.0), HIDDEN))
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    out = helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, ["batch", "sequence", HIDDEN])
    model = graph([helper.make_node("Gather", ["table", "input_ids"], ["inputs_embeds"])], [ids], [out], [rows])
    place_features(model, 7)
    onnx.checker.check_model(model)
    return model


def embedded(ids: list[list[int]], features: int) -> list[list[float]]:
    """First numbers of the embeddings, with features -1, -2, …"""
    rows = np.repeat(-np.arange(1.0, features + 1, dtype=np.float32)[:, None], HIDDEN, axis=1)
    feeds = {"input_ids": np.array(ids), "image_features": rows}
    (found,) = session(embedding_table()).run(None, feeds)
    first: list[list[float]] = found[..., 0].tolist()
    return first


def test_features_take_the_places_of_the_placeholders_row_by_row() -> None:
    assert embedded([[1, 7, 2, 7], [7, 3, 4, 5]], 3) == [[1, -1, 2, -2], [-3, 3, 4, 5]]


def test_without_features_a_placeholder_is_a_token_like_others() -> None:
    assert embedded([[7]], 0) == [[7]]


def test_another_number_of_features_than_placeholders_fails() -> None:
    for count in (1, 3):
        with pytest.raises(Exception, match="ScatterND"):
            embedded([[1, 7, 2, 7]], count)


def tower(precision: int) -> onnx.ModelProto:
    """Two features of three numbers for each image of six pixels, which they equal."""
    pixels = helper.make_tensor_value_info("pixel_values", precision, ["num_images", 1, 2, HIDDEN])
    out = helper.make_tensor_value_info("image_features", precision, ["num_images", 2, HIDDEN])
    shape = helper.make_tensor("shape", TensorProto.INT64, [3], [-1, 2, HIDDEN])
    return graph([helper.make_node("Reshape", ["pixel_values", "shape"], ["image_features"])], [pixels], [out], [shape])


@pytest.mark.parametrize("precision", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_a_tower_of_any_precision_takes_float32_pixels_and_returns_rows(precision: int) -> None:
    model = tower(precision)
    take_float32_pixels(model)
    flatten_features(model)
    onnx.checker.check_model(model)
    pixels = np.arange(12, dtype=np.float32).reshape(2, 1, 2, HIDDEN)
    (rows,) = session(model).run(None, {"pixel_values": pixels})
    np.testing.assert_array_equal(rows, pixels.reshape(4, HIDDEN))


@pytest.mark.slow
def test_transformersjs_gets_three_graphs_that_link_to_one_file_of_weights(llava: Path) -> None:
    for part in PARTS:
        assert (llava / "onnx" / f"{part}.onnx").resolve() == llava / f"transformersjs-{part}.graph"
        assert (llava / "onnx" / f"{part}.onnx_data").resolve() == llava / "model.safetensors"
        onnxruntime.InferenceSession(str(llava / "onnx" / f"{part}.onnx"))


@pytest.mark.slow
def test_in_a_new_folder_every_graph_has_weight_files_of_its_own(renewed: Path) -> None:
    config = json.loads((renewed / "config.json").read_text())["transformers.js_config"]
    assert config["use_external_data_format"] == {f"{part}.onnx": 1 for part in PARTS}
    files = {(renewed / "onnx" / f"{part}.onnx_data").resolve() for part in PARTS}
    assert len(files) == len(PARTS)
    for part in PARTS:
        onnxruntime.InferenceSession(str(renewed / "onnx" / f"{part}.onnx"))


def test_a_weight_of_several_graphs_is_in_a_file_that_no_other_weight_is_in() -> None:
    decoder, table = ({name: StoredRows(name, (2, 2)) for name in names} for names in (("layer", "tied"), ("tied",)))
    assert graph_parts([decoder, table]) == {"layer": 0, "tied": 1}


def test_transformersjs_gets_the_preprocessor_config_that_it_requires(llava: Path) -> None:
    content = json.loads((llava / "preprocessor_config.json").read_text())
    assert (content["image_processor_type"], content["processor_class"]) == ("CLIPImageProcessor", "LlavaProcessor")
    assert content["crop_size"] == {"height": SIZE, "width": SIZE}


def test_a_preprocessor_config_is_not_replaced() -> None:
    fields = {"image_processor": {"image_processor_type": "CLIPImageProcessor"}}
    assert preprocessor(ImageModel(None, {}, fields, has_preprocessor=True)) == {}
    assert preprocessor(ImageModel(None, {}, {}, has_preprocessor=False)) == {}


def test_a_new_folder_counts_placeholders_as_both_clients_do(llava: Path, renewed: Path, tmp_path: Path) -> None:
    import transformers  # noqa: PLC0415

    content = json.loads((renewed / "processor_config.json").read_text())
    assert content["num_additional_image_tokens"] == 0  # transformers.js adds this number and subtracts nothing
    picture = save_picture(tmp_path / "picture.png")
    processors = [transformers.AutoProcessor.from_pretrained(folder) for folder in (llava, renewed)]
    before, after = (processor(images=str(picture), text="a ~ b")["input_ids"] for processor in processors)
    assert before == after and before[0].count(IMAGE_ID) == 4


def test_the_model_folder_keeps_its_own_processor_with_a_warning(in_place: tuple[Path, list[str]]) -> None:
    folder, warnings = in_place
    content = json.loads((folder / "processor_config.json").read_text())
    assert content["vision_feature_select_strategy"] == "default"
    assert [text for text in warnings if "`processor_config.json` of the model folder stays as it is" in text]


def test_a_new_folder_has_the_fields_of_the_text_config_that_the_client_has_no_defaults_for(llava: Path) -> None:
    import transformers  # noqa: PLC0415

    config = transformers.AutoConfig.from_pretrained(llava)
    found = edits(ImageModel(config, {"text_config": {"model_type": "llama", "vocab_size": 96}}))
    assert found == {"config.json": {"text_config": {"model_type": "llama", "vocab_size": 96, "num_hidden_layers": 4}}}


@pytest.mark.slow
def test_resuming_a_complete_new_folder_writes_nothing(llava: Path, renewed: Path) -> None:
    again = export(llava, renewed, layout="transformersjs", resume=True)
    assert again.sizes is not None and again.sizes.copied == 0


def test_genai_config_chains_the_three_graphs(llava: Path) -> None:
    model = read_genai_config(llava)
    assert model["embedding"]["filename"] == "genai-embeddings.graph"
    assert model["vision"]["filename"] == "genai-vision.graph"
    assert "input_ids" not in model["decoder"]["inputs"]


def test_the_graphs_of_clients_are_guarded_whatever_their_names_end_with(llava: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(llava, tmp_path / "llava", symlinks=True))
    (copied / "genai-vision.graph").write_bytes(b"no graph")
    with pytest.raises(MalformedInput):
        read_genai_config(copied)


def test_genai_refuses_a_pair_of_decoder_graphs(llava: Path) -> None:
    with pytest.raises(UsageProblem, match="as one decoder graph") as refused:
        export(llava, prefill=True, incremental=True, layout="genai", overwrite=True)
    assert "--unified" in refused.value.hint


@pytest.mark.quick_rows("aya_vision")
@pytest.mark.parametrize("model_type", sorted(TOWERS.keys() - {"llava"}))
def test_transformersjs_refuses_types_that_it_has_no_class_for(model_type: str, tmp_path: Path) -> None:
    folder = save_tower(model_type, tmp_path / model_type)
    with pytest.raises(UnsupportedInput, match=f"does not support images of the model type `{model_type}`") as refused:
        export(folder, layout="transformersjs")
    assert refused.value.hint.endswith("that it supports: llava")


def test_optimum_refuses_models_with_images(llava: Path) -> None:
    with pytest.raises(UnsupportedInput, match="`optimum` does not support images"):
        export(llava, layout="optimum", overwrite=True)


def test_genai_supports_towers_that_are_exported_only() -> None:
    assert VISION_TOWERS.keys() >= IMAGE_MODELS
