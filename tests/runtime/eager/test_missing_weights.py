"""A folder whose weights transformers would make up, leave out or cast is refused, as `export` refuses it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_file
from safetensors.torch import save_file as save_torch

from llmconv.compressed import quantize
from llmconv.convert import to_hf
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.generation import TextModel
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.low_memory.runner import StreamedRunner
from tests.builders.torch_states import FIXTURES

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def without_a_norm(talking: Path, tmp_path: Path) -> Path:
    """A model with a tokenizer whose weights lack one tensor."""
    folder = shutil.copytree(talking, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_one_missing_tensor_is_named(without_a_norm: Path) -> None:
    refused = f"missing keys: 1 tensors of the model are not in .*, first `{NORM}`"
    with pytest.raises(MalformedInput, match=refused):
        EagerRunner(without_a_norm)
    with pytest.raises(MalformedInput, match=refused):
        StreamedRunner(without_a_norm)


def test_generate_on_the_eager_model_is_refused(without_a_norm: Path) -> None:
    with pytest.raises(MalformedInput, match="missing keys"):
        TextModel.open(without_a_norm, backend="torch")


@pytest.mark.parametrize("size", [1, 9999])
def test_rows_that_are_not_those_of_the_vocabulary_are_named(size: int, talking: Path, tmp_path: Path) -> None:
    folder = _changed(talking, tmp_path, {"vocab_size": size})
    for runner in (EagerRunner, StreamedRunner):
        with pytest.raises(MalformedInput, match=rf"weight` .* rows, its `vocab_size` is {size}"):
            runner(folder)


def test_the_weights_of_another_family_are_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((tiny("gpt2") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MalformedInput, match="missing keys"):
        EagerRunner(folder)


def _changed(talking: Path, tmp_path: Path, config: dict[str, object], **tensors: np.ndarray) -> Path:
    """A copy of a model with other fields of its config and further or other tensors (`__` for `.`)."""
    folder = shutil.copytree(talking, tmp_path / "changed")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    weights = load_file(folder / "model.safetensors")
    weights |= {name.replace("__", "."): array for name, array in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        pytest.param({"num_hidden_layers": 1}, {}, id="fewer layers than the weights have"),
        pytest.param({}, {"model__layers__0__self_attn__q_proj__bias": np.ones(4, np.float32)}, id="a bias"),
        pytest.param({}, {"model__layers__0__mlp__up_proj__weight_scale": np.ones(1, np.float32)}, id="a scale"),
        pytest.param({}, {"model__layers__99__mlp__up_proj__weight": np.ones((2, 2), np.float32)}, id="another layer"),
        pytest.param({}, {"layers__99__mlp__up_proj__weight": np.ones((2, 2), np.float32)}, id="without the prefix"),
    ],
)
def test_weights_that_the_model_would_leave_out_are_refused(
    talking: Path, tmp_path: Path, config: dict[str, object], tensors: dict[str, np.ndarray]
) -> None:
    folder = _changed(talking, tmp_path, config, **tensors)
    with pytest.raises(MalformedInput, match="unexpected keys"):
        TextModel.open(folder, backend="torch")
    with pytest.raises(MalformedInput, match="unexpected keys"):
        StreamedRunner(folder)
    with pytest.raises(MalformedInput, match="unexpected keys"):
        EagerRunner(folder, factors=lambda name, shape: 1.0)


def test_computed_values_and_other_parts_may_be_left_over(talking: Path, tmp_path: Path) -> None:
    others = {
        "vision_tower__layers__0__self_attn__q_proj__weight": np.ones((2, 2), np.float32),
        "model__layers__0__self_attn__rotary_emb__inv_freq": np.ones(4, np.float32),
    }
    folder = _changed(talking, tmp_path, {}, **others)
    EagerRunner(folder)
    StreamedRunner(folder)


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "of another library"}}])
def test_integers_without_a_quantization_are_refused(talking: Path, tmp_path: Path, config: dict[str, object]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    codes = load_file(talking / "model.safetensors")[name].astype(np.int8)
    with pytest.raises(MalformedInput, match="1 weights that are integers"):
        TextModel.open(_changed(talking, tmp_path, config, **{name.replace(".", "__"): codes}), backend="torch")


def test_codes_that_transformers_does_not_read_are_named_with_the_way_out() -> None:
    with pytest.raises(UnsupportedInput, match="does not read weights that are quantized with `modelopt`") as caught:
        EagerRunner(FIXTURES / "quantized/modelopt_nvfp4")
    assert f"`llmconv to-hf {FIXTURES / 'quantized/modelopt_nvfp4'} -o OUT --quant dequantize`" in caught.value.hint


def test_an_index_that_names_another_folder_is_refused(talking: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(talking, tmp_path / "model")
    shutil.move(folder / "model.safetensors", tmp_path / "private.safetensors")
    names = load_file(tmp_path / "private.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../private.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MalformedInput, match="invalid shard name"):
        TextModel.open(folder, backend="torch")


def test_zero_points_that_compressed_tensors_wants_are_not_made_up(talking: Path, tmp_path: Path) -> None:
    """Static scales of activations, as llm-compressor writes them, in a folder saved as `frozen`."""
    quantize(talking, tmp_path / "made", scheme="fp8-dynamic")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    settings = config["quantization_config"]
    tensors = torch_file(tmp_path / "made" / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        weight, scale = name.removesuffix("_scale"), tensors[name].float()
        whole = scale.max()
        tensors[weight] = (tensors[weight].float() * scale / whole).to(torch.float8_e4m3fn)
        tensors[name] = whole.reshape(1)
        tensors[name.replace("weight_scale", "input_scale")] = torch.tensor([0.05])
    save_torch(tensors, tmp_path / "made" / "model.safetensors", metadata={"format": "pt"})
    static = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    group = settings["config_groups"]["group_0"]
    group["weights"]["strategy"], group["input_activations"] = "tensor", static
    for status in ("compressed", "frozen"):
        settings["quantization_status"] = status
        (tmp_path / "made" / "config.json").write_text(json.dumps(config))
        if status == "compressed":
            assert TextModel.open(tmp_path / "made", backend="torch").runner
            continue
        with pytest.raises(UnsupportedInput, match="`quantization_status` is `frozen`") as refused:
            TextModel.open(tmp_path / "made", backend="torch")
        assert "--quant dequantize" in refused.value.hint
    to_hf(tmp_path / "made", tmp_path / "plain", quant="dequantize")
    assert TextModel.open(tmp_path / "plain", backend="torch").runner
