"""`--kv-cache int8`: scales, the graphs, what is refused, and that the runtime keeps codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import open_checkpoint
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.export.calibration import KeyRotation, key_rotations
from llmconv.export.graph_spec import GROWING
from llmconv.export.language_model import open_language_model
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.runner import ArrayCache, default_positions
from llmconv.runtime.tokenizer import load_tokenizer
from llmconv.tensors import Array
from tools.tiny_models import depth, save_tiny

TEXT = "Once there was a clever robot named Bolt. Bolt sailed an iron ship over the cold sea. " * 6


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def coded(talking: Path, prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded") / "out"
    export(talking, folder, unified=True, kv_cache="int8", calibrate=prose)
    return folder


def scales_of(folder: Path) -> dict[str, Array]:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    found = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer if one.name.endswith(".scale")}
    return {name.removesuffix(".scale"): scale for name, scale in found.items()}


def tokens_of(folder: Path) -> Array:
    return np.array([load_tokenizer(folder, False)(TEXT)["input_ids"]], dtype=np.int64)


def cached_by_torch(folder: Path) -> dict[str, Array]:
    """Keys and values of the text by name of the cache input, computed by transformers in pieces of 512 tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokens_of(folder)
    found: dict[str, list[Array]] = {}
    limit = model.config.max_position_embeddings
    for start in range(0, ids.shape[1], min(512, limit)):
        with torch.no_grad():
            cache = model(torch.from_numpy(ids[:, start : start + min(512, limit)])).past_key_values
        for index, layer in enumerate(cache.layers):
            for part in ("key", "value"):
                found.setdefault(f"past_key_values.{index}.{part}", []).append(getattr(layer, f"{part}s")[0].numpy())
    return {name: np.concatenate(parts, axis=1) for name, parts in found.items()}


@pytest.mark.slow
def test_a_scale_is_the_range_of_its_channel_and_keys_of_a_rotary_pair_share_it(talking: Path, coded: Path) -> None:
    scales = scales_of(coded)
    expected = cached_by_torch(talking)
    assert scales.keys() == expected.keys()
    for name, cached in expected.items():
        largest = np.abs(cached).max(axis=1)
        if name.endswith(".key"):
            half = largest.shape[1] // 2
            largest = np.tile(np.maximum(largest[:, :half], largest[:, half:]), (1, 2))
        assert np.allclose(scales[name][0, :, 0], 1.1 * largest / 127, rtol=1e-4), name


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "rotation"),
    [("llama", KeyRotation.HALVES), ("gpt2", KeyRotation.NONE), ("gptj", KeyRotation.UNKNOWN)],
)
def test_the_rotation_of_keys_is_found_in_the_graph(model_type: str, rotation: KeyRotation, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path, depth(model_type))
    traced = open_language_model(open_checkpoint(tmp_path)).trace({"unified": GROWING})[0]["unified"]
    found = key_rotations(traced)
    assert len(found) == traced.num_layers and set(found.values()) == {rotation}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rotation", "shared"),
    [
        (KeyRotation.NONE, [1, 2, 3, 4]),
        (KeyRotation.HALVES, [3, 4, 3, 4]),
        (KeyRotation.NEIGHBORS, [2, 2, 4, 4]),
        (KeyRotation.UNKNOWN, [4, 4, 4, 4]),
    ],
)
def test_channels_that_are_mixed_share_the_largest_maximum(rotation: KeyRotation, shared: list[int]) -> None:
    assert rotation.shared(np.array([[1, 2, 3, 4]])).tolist() == [shared]


@pytest.mark.slow
def test_every_port_of_the_cache_is_int8_and_the_manifest_says_so(coded: Path) -> None:
    graph = onnx.load(coded / "model.onnx", load_external_data=False).graph
    ports = [*graph.input, *graph.output]
    kinds = {port.type.tensor_type.elem_type for port in ports if port.name.startswith(("past_", "present."))}
    assert kinds == {TensorProto.INT8}
    assert '"kv_cache": "int8"' in (coded / "llmconv.json").read_text()


@pytest.mark.slow
def test_steps_continue_codes_and_choose_the_tokens_of_the_model(talking: Path, coded: Path) -> None:
    runner, model = OrtRunner.from_folder(coded), OrtRunner.from_folder(talking)
    ids = tokens_of(talking)[:, :40]
    mask = np.ones_like(ids)
    steps = [one.prefill(ids, mask, default_positions(mask, 40)) for one in (runner, model)]
    assert {array.dtype for array in steps[0].present.arrays().values()} == {np.dtype(np.int8)}
    for length in range(41, 46):
        tokens = [step.logits[:, -1].argmax(-1)[:, None] for step in steps]
        assert np.array_equal(*tokens)
        mask = np.ones((1, length), dtype=np.int64)
        rest = mask, default_positions(mask, 1)
        steps = [one.decode(tokens[0], *rest, step.present) for one, step in zip((runner, model), steps, strict=True)]


@pytest.mark.slow
def test_numbers_cannot_be_continued_as_codes(talking: Path, coded: Path) -> None:
    ids = tokens_of(talking)[:, :8]
    mask = np.ones_like(ids)
    past = OrtRunner.from_folder(talking).prefill(ids, mask, default_positions(mask, 8)).present
    longer = np.ones((1, 9), dtype=np.int64)
    with pytest.raises(InputRefused, match="has the dtype int8"):
        OrtRunner.from_folder(coded).decode(
            ids[:, :1], longer, default_positions(longer, 1), ArrayCache(past.arrays(), 8)
        )


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "--cache growing": {"cache": "growing"},
    "--shapes static": {"shapes": "static", "max_seq_len": 64},
    "--precision float16": {"precision": "float16"},
    "--target ort-cuda": {"target": "ort-cuda"},
    "--stages": {"stages": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("option", CONTRADICTIONS)
def test_options_that_cannot_keep_codes_are_refused(option: str, talking: Path, prose: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=option):
        export(talking, tmp_path / "out", kv_cache="int8", calibrate=prose, **CONTRADICTIONS[option])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_without_a_text_that_of_llmconv_is_used(talking: Path, tmp_path: Path) -> None:
    export(talking, tmp_path / "own", unified=True, kv_cache="int8")
    export(talking, tmp_path / "default", unified=True, kv_cache="int8", calibrate="default")
    graphs = [(tmp_path / name / "model.onnx").read_bytes() for name in ("own", "default")]
    assert graphs[0] == graphs[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["optimum", "transformersjs"])
def test_layouts_without_a_shared_buffer_are_refused(layout: str, talking: Path, prose: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=f"layout `{layout}` does not support"):
        export(talking, tmp_path / "out", kv_cache="int8", calibrate=prose, layout=layout)


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gptj", "mamba"])
def test_families_with_another_attention_are_refused_by_name(model_type: str, prose: Path, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path / "model", depth(model_type))
    with pytest.raises(UnsupportedInput, match=f"`{model_type}`"):
        export(tmp_path / "model", tmp_path / "out", kv_cache="int8", calibrate=prose)
    assert not (tmp_path / "out").exists()
