"""PaddleNLP's LoRA adapters: genuine ones give the upstream's logits, fused and split ones what adding them gives."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import merge_lora, to_hf
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput
from tests.builders.paddle_models import CONFIG, FIXTURES, Model, fused, save_whole, whole_model

SCALING = 2.0
Judge = Callable[..., Any]


@pytest.mark.parametrize("case", ["lora_llama", "lora_llama_rslora", "lora_qwen2", "lora_gpt"])
def test_the_merged_model_has_the_logits_of_the_adapted_one(case: str, tmp_path: Path, logits_of: Judge) -> None:
    to_hf(FIXTURES / case / "base", tmp_path / "base")
    merge_lora(tmp_path / "base", [FIXTURES / case / "lora"], tmp_path / "merged")
    with np.load(FIXTURES / case / "reference.npz") as reference:
        logits = logits_of(tmp_path / "merged", reference["input_ids"])
        assert np.abs(logits - reference["logits"]).max() < 1e-5 * np.abs(reference["logits"]).max()
        assert np.abs(logits - reference["logits_base"]).max() > 0.1


def adapter_of(model: Model, modules: tuple[str, ...]) -> Model:
    """Random factors, in Paddle's layout, for the modules of all layers."""
    random = np.random.default_rng(1)
    tensors: Model = {}
    for name in [name for name in model if name.endswith(modules)]:
        inputs, outputs = model[name].shape
        module = name.removesuffix(".weight")
        tensors[f"{module}.lora_A"] = random.standard_normal((inputs, 2)).astype("f4")
        tensors[f"{module}.lora_B"] = random.standard_normal((2, outputs)).astype("f4")
    return tensors


def save_adapter(folder: Path, files: dict[str, Model], **fields: Any) -> Path:
    folder.mkdir()
    config = {"r": 2, "lora_alpha": 4, "rslora": False, "scaling": SCALING, "tensor_parallel_degree": len(files)}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "lora_config.json").write_text(json.dumps(config | fields))
    for name, tensors in files.items():
        (folder / name).write_bytes(pickle.dumps(tensors, 4))
    return folder


def added(model: Model, adapter: Model) -> Model:
    """The model with the adapter added."""
    return {
        name: array + SCALING * adapter[f"{stem}.lora_A"] @ adapter[f"{stem}.lora_B"]
        if f"{stem}.lora_A" in adapter
        else array
        for name, array in model.items()
        for stem in [name.removesuffix(".weight")]
    }


def check_merge(model: Model, adapter: Path, whole_adapter: Model, folder: Path) -> None:
    """Merging into the converted base is converting the base that the adapter was added to."""
    to_hf(save_whole(folder / "base", model), folder / "base-hf")
    to_hf(save_whole(folder / "tuned", added(model, whole_adapter)), folder / "tuned-hf")
    merge_lora(folder / "base-hf", [adapter], folder / "merged")
    merged, expected = open_checkpoint(folder / "merged"), open_checkpoint(folder / "tuned-hf")
    for name, tensor in expected.items():
        np.testing.assert_allclose(merged[name].read(), tensor.read(), rtol=0, atol=2e-6, err_msg=name)


def test_an_adapter_of_fused_layers_is_split_as_their_weights_are(tmp_path: Path) -> None:
    model = fused(whole_model(), 1)[0]
    tensors = adapter_of(model, ("qkv_proj.weight", "gate_up_fused_proj.weight", "o_proj.weight"))
    check_merge(model, save_adapter(tmp_path / "lora", {"lora_model_state.pdparams": tensors}), tensors, tmp_path)


def test_the_files_of_tensor_parallel_ranks_are_joined(tmp_path: Path) -> None:
    model = whole_model()
    tensors = adapter_of(model, ("q_proj.weight", "down_proj.weight"))
    ranks: dict[str, Model] = {}
    for rank in range(2):
        cuts = {"q_proj.lora_B": 1, "down_proj.lora_A": 0}
        ranks[f"lora_model_state.tp{rank:02}.pdparams"] = {
            name: next((np.split(array, 2, axis)[rank] for end, axis in cuts.items() if name.endswith(end)), array)
            for name, array in tensors.items()
        }
    check_merge(model, save_adapter(tmp_path / "lora", ranks), tensors, tmp_path)


def test_trained_whole_tensors_replace_those_of_the_base(tmp_path: Path) -> None:
    model = whole_model()
    norm = {"llama.norm.weight": np.full(8, 3, "f4")}
    tensors = adapter_of(model, ("v_proj.weight",)) | norm
    adapter = save_adapter(tmp_path / "lora", {"lora_model_state.pdparams": tensors})
    check_merge(model | norm, adapter, tensors, tmp_path)


def refusal(tensors: Model, folder: Path, **fields: Any) -> LlmconvError:
    to_hf(save_whole(folder / "base", whole_model()), folder / "hf")
    adapter = save_adapter(folder / "lora", {"lora_model_state.pdparams": tensors}, **fields)
    with pytest.raises(InputRefused) as refused:
        merge_lora(folder / "hf", [adapter], folder / "out")
    assert not (folder / "out").exists()
    return refused.value


@pytest.mark.parametrize("field", ["pissa", "use_mora", "lora_use_mixer", "loraga", "do_qat", "enable_lora_list"])
def test_other_formulas_are_refused_by_name(field: str, tmp_path: Path) -> None:
    error = refusal(adapter_of(whole_model(), ("q_proj.weight",)), tmp_path, **{field: [True]})
    assert isinstance(error, UnsupportedInput) and field in str(error)


def test_a_scaling_that_does_not_follow_from_alpha_and_rank_is_refused(tmp_path: Path) -> None:
    error = refusal(adapter_of(whole_model(), ("q_proj.weight",)), tmp_path, scaling=1.0)
    assert isinstance(error, MalformedInput) and "scaling" in str(error)


def test_a_factor_without_its_partner_is_refused(tmp_path: Path) -> None:
    tensors = adapter_of(whole_model(), ("q_proj.weight",))
    del tensors["llama.layers.1.self_attn.q_proj.lora_B"]
    assert "llama.layers.1.self_attn.q_proj.lora_A" in str(refusal(tensors, tmp_path))


def test_an_adapter_of_another_architecture_is_refused_though_its_shapes_fit(tmp_path: Path) -> None:
    to_hf(FIXTURES / "lora_llama" / "base", tmp_path / "hf")
    with pytest.raises(MalformedInput, match="qwen2, the base is a llama"):
        merge_lora(tmp_path / "hf", [FIXTURES / "lora_qwen2" / "lora"], tmp_path / "out")


def test_factors_of_another_size_are_refused(tmp_path: Path) -> None:
    tensors = adapter_of(whole_model(), ("q_proj.weight",))
    tensors["llama.layers.0.self_attn.q_proj.lora_B"] = np.zeros((2, 10), "f4")
    assert "llama.layers.0.self_attn.q_proj.lora_B" in str(refusal(tensors, tmp_path))


def test_a_missing_rank_is_refused(tmp_path: Path) -> None:
    tensors = adapter_of(whole_model(), ("q_proj.weight",))
    adapter = save_adapter(tmp_path / "lora", {"lora_model_state.tp00.pdparams": tensors}, tensor_parallel_degree=2)
    to_hf(save_whole(tmp_path / "base", whole_model()), tmp_path / "hf")
    with pytest.raises(MalformedInput, match="tensor-parallel 1"):
        merge_lora(tmp_path / "hf", [adapter], tmp_path / "out")


def test_the_weights_file_alone_names_the_missing_file(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "lora_llama" / "lora", tmp_path / "lora")
    (tmp_path / "lora" / "config.json").unlink()
    to_hf(save_whole(tmp_path / "base", whole_model()), tmp_path / "hf")
    with pytest.raises(InputRefused, match=r"config\.json"):
        merge_lora(tmp_path / "hf", [tmp_path / "lora"], tmp_path / "out")


def test_a_base_that_is_not_converted_is_refused_with_the_commands(tmp_path: Path) -> None:
    base, adapter = save_whole(tmp_path / "base", whole_model()), tmp_path / "my lora"
    with pytest.raises(InputRefused, match=r"is a training checkpoint \(paddle\)") as refused:
        merge_lora(base, adapter, tmp_path / "out")
    assert f"`llmconv to-hf {base} -o HF_BASE`" in refused.value.hint
    assert f"`llmconv merge-lora HF_BASE '{adapter}' -o OUT`" in refused.value.hint
