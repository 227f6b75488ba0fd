"""Plain torch state dicts: genuine folders give the upstream's logits; whatever is not the whole model is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM, LlamaConfig

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.inspection import inspect
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.builders.torch_states import FIXTURES, GPT2, LLAMA, gpt2_base_state, llama_state, prefixed, save

FOLDER = FIXTURES / "torch"
CASES = ["gpt2_before_1_6", "llama_sharded", "opt"]


@pytest.mark.slow_rows("opt")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_upstream_model(tmp_path: Path, logits_of: Callable[..., Any], case: str) -> None:
    to_hf(FOLDER / case, tmp_path / "hf")
    with np.load(FOLDER / case / "reference.npz") as reference:
        assert np.abs(logits_of(tmp_path / "hf", reference["input_ids"]) - reference["logits"]).max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_only_this_format_claims_the_folder(case: str) -> None:
    assert [name for name, found in formats().items() if found.detect(FOLDER / case)] == ["torch"]


@pytest.mark.parametrize("case", ["llama_sharded", "opt"])
def test_every_tensor_is_that_of_the_file_to_the_bit(tmp_path: Path, case: str) -> None:
    to_hf(FOLDER / case, tmp_path / "hf")
    written = open_checkpoint(tmp_path / "hf")
    shards = [torch.load(file) for file in sorted((FOLDER / case).glob("*.bin"))]
    stored = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert {*stored} - {*written} <= {"lm_head.weight"}
    assert all(np.array_equal(written[name].read(), stored[name].numpy()) for name in written)


@pytest.mark.parametrize(
    ("around", "place"),
    [
        (lambda copy: {"ema": copy, "decay": 0.99}, "ema"),
        (lambda copy: {"ema": {"module": {f"module.{name}": one for name, one in copy.items()}}}, "ema.module"),
        (lambda copy: {"callbacks": {"EMA": {"ema_state_dict": copy}}}, "callbacks.EMA.ema_state_dict"),
        (lambda copy: {"shadow_params": [*copy.values()]}, "shadow_params"),
        (lambda copy: {"optimizer": {"exp_avg": copy}, "best": {"epoch": 3}}, ""),
        (lambda copy: {"adapter": dict([*copy.items()][:2])}, ""),
    ],
)
def test_a_second_copy_of_the_model_is_named(tmp_path: Path, around: Callable[..., Any], place: str) -> None:
    state = llama_state()
    copy = {name: tensor + 1 for name, tensor in state.items()}
    found = open_training(save(tmp_path / "x.pt", {"model": state, **around(copy)}))
    assert any(f"the model again under `{place}`" in warning for warning in found.warnings) == bool(place)
    assert all(np.array_equal(found[name].read(), state[name].numpy()) for name in found)


def test_an_averaged_model_of_torch_is_the_average(tmp_path: Path) -> None:
    state = AveragedModel(AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))).state_dict()
    assert "n_averaged" in state
    found = open_training(save(tmp_path / "x.pt", state))
    assert all(np.array_equal(found[name].read(), state[f"module.{name}"].numpy()) for name in found)


def test_an_embedding_that_was_not_gathered_is_called_so(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", llama_state() | {"model.embed_tokens.weight": torch.zeros(0)})
    with pytest.raises(MalformedInput) as caught:
        to_hf(path, tmp_path / "out")
    assert "without gathering it" in caught.value.hint


@pytest.mark.parametrize("key", [None, "model", "state_dict", "model_state_dict", "module"])
def test_the_state_dict_may_lie_one_level_down(tmp_path: Path, key: str | None) -> None:
    state = llama_state()
    content = {key: state, "optimizer": {"lr": 1.0}, "epoch": 3} if key else state
    found = open_training(save(tmp_path / "x.pt", content))
    assert found.format == "torch" and set(found) == set(state)
    assert found.dropped == (("the optimizer's state",) if key else ())


def test_a_model_without_its_head_gets_the_names_of_one_that_has_it(tmp_path: Path) -> None:
    found = open_training(save(tmp_path / "pytorch_model.bin", gpt2_base_state(), GPT2))
    assert all(name.startswith("transformer.") for name in found)
    assert found.config["tie_word_embeddings"] is True
    assert any("added `transformer.` to the names" in warning for warning in found.warnings)


def test_a_head_next_to_a_base_model_keeps_its_name(tmp_path: Path) -> None:
    state = gpt2_base_state()
    found = settled(open_training(save(tmp_path / "x.bin", {**state, "lm_head.weight": torch.ones(16, 8)}, GPT2)))
    assert "lm_head.weight" in found and found.config["tie_word_embeddings"] is False


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": False}])
def test_a_missing_head_that_is_not_tied_is_refused(tmp_path: Path, said: dict[str, bool]) -> None:
    state = {name: tensor for name, tensor in llama_state().items() if name != "lm_head.weight"}
    config = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"} | said
    with pytest.raises(InputRefused, match="no output head"):
        open_training(save(tmp_path / "x.bin", state, config))
    assert open_training(save(tmp_path / "y.bin", state, config | {"tie_word_embeddings": True}))


def test_old_names_of_norms_become_the_new_ones(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in gpt2_base_state().items() if "ln_f" not in name}
    state |= {"ln_f.gamma": torch.ones(8), "ln_f.beta": torch.zeros(8)}
    found = open_training(save(tmp_path / "x.bin", state, GPT2))
    assert {"transformer.ln_f.weight", "transformer.ln_f.bias"} <= set(found)


def test_recomputed_buffers_are_left_out_and_reported(tmp_path: Path) -> None:
    state = gpt2_base_state()
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    scalars = {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    found = open_training(save(tmp_path / "x.bin", state | masks | scalars, GPT2))
    assert len(found) == len(state) and found.dropped == ("4 causal masks, which the model computes",)
    rotary = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(2) for layer in range(2)}
    llama = open_training(save(tmp_path / "y.bin", llama_state() | rotary))
    assert llama.dropped == ("2 rotary tables, which the model computes",)


def test_wrappers_in_the_names_vanish(tmp_path: Path) -> None:
    found = open_training(save(tmp_path / "x.pt", prefixed(llama_state(), "module._orig_mod.")))
    assert set(found) == set(llama_state())


def test_tokenizer_and_generation_files_travel_and_can_be_replaced(tmp_path: Path) -> None:
    path = save(tmp_path / "a" / "x.bin", llama_state())
    (path.parent / "generation_config.json").write_text("{}")
    (path.parent / "tokenizer.json").write_text("old")
    (tmp_path / "tokenizer.json").write_text("new")
    assert open_training(path).side_files == {"generation_config.json": b"{}", "tokenizer.json": b"old"}
    assert open_training(path, tokenizer=tmp_path / "tokenizer.json").side_files["tokenizer.json"] == b"new"


def test_a_configuration_of_2019_that_names_only_the_class_is_enough(tmp_path: Path) -> None:
    config = {name: value for name, value in GPT2.items() if name != "model_type"}
    path = save(tmp_path / "x.bin", gpt2_base_state(), config | {"architectures": ["GPT2LMHeadModel"]})
    assert open_training(path).config["model_type"] == "gpt2"


def test_a_configuration_can_be_given(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", llama_state(), None)
    with pytest.raises(InputRefused, match="not contain a model configuration"):
        open_training(path)
    (tmp_path / "given.json").write_text(json.dumps(LLAMA))
    assert open_training(path, config=(tmp_path / "given.json",)).config["hidden_size"] == 8


def test_inspect_shows_the_tensors_where_the_configuration_is_missing(tmp_path: Path) -> None:
    found = inspect(save(tmp_path / "x.bin", {"model": llama_state()}, None))
    assert found.format == "torch" and set(found.tensors) == set(llama_state())


# Folders


def sharded(tmp_path: Path) -> Path:
    return shutil.copytree(FOLDER / "llama_sharded", tmp_path / "sharded")


def change_index(folder: Path, name: str, shard: Any) -> None:
    index = folder / "pytorch_model.bin.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][name] = shard
    index.write_text(json.dumps(content))


def test_shards_count_and_the_writer_is_reported() -> None:
    found = open_training(FOLDER / "llama_sharded")
    assert (found.shards, found.version) == (3, "transformers 4.46.3")


def test_shards_without_an_index_are_joined_by_number(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "pytorch_model.bin.index.json").unlink()
    assert set(open_training(folder)) == set(open_training(FOLDER / "llama_sharded"))
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(MalformedInput, match=r"2 of 3 shards \(numbers 1, 3\); number 2 is missing"):
        open_training(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(MalformedInput, match="pytorch_model-00002-of-00003.bin"):
        open_training(folder)


@pytest.mark.parametrize("shard", ["../x.bin", "/etc/x.bin", 3, "x.pkl", None])
def test_the_index_names_plain_files_only(tmp_path: Path, shard: Any) -> None:
    folder = sharded(tmp_path)
    change_index(folder, "model.norm.weight", shard)
    with pytest.raises(MalformedInput, match="invalid shard name"):
        open_training(folder)


@pytest.mark.parametrize("name", ["model.extra.weight", "model.norm.weight"])
def test_an_index_that_the_shards_contradict_is_refused(tmp_path: Path, name: str) -> None:
    folder = sharded(tmp_path)
    change_index(folder, name, "pytorch_model-00001-of-00003.bin")
    with pytest.raises(MalformedInput, match="differ in 1 tensors"):
        open_training(folder)


@pytest.mark.parametrize("added", [0.0, 0.5])
def test_copies_of_a_tensor_in_two_shards_have_to_be_equal(tmp_path: Path, added: float) -> None:
    folder, name = sharded(tmp_path), "model.norm.weight"
    expected = open_training(folder)[name].read()
    state = torch.load(folder / "pytorch_model-00001-of-00003.bin")
    torch.save({**state, name: torch.from_numpy(expected) + added}, folder / "pytorch_model-00001-of-00003.bin")
    if not added:
        assert np.array_equal(open_training(folder)[name].read(), expected)
        return
    with pytest.raises(MalformedInput, match=f"two shards have `{name}`, with different values"):
        open_training(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_without_a_map_is_refused(tmp_path: Path, content: str) -> None:
    folder = sharded(tmp_path)
    (folder / "pytorch_model.bin.index.json").write_text(content)
    with pytest.raises(MalformedInput):
        open_training(folder)


def test_one_shard_of_several_is_refused_and_the_folder_named() -> None:
    with pytest.raises(InputRefused, match="one shard of several") as caught:
        open_training(FOLDER / "llama_sharded" / "pytorch_model-00003-of-00003.bin")
    assert "llama_sharded" in caught.value.hint


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / f"pytorch_model-0000{number}-of-00002.bin", llama_state())
    with pytest.raises(MalformedInput, match="duplicate keys"):
        open_training(tmp_path)


def test_a_folder_with_safetensors_already_is_a_model_folder(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model.safetensors").touch()
    with pytest.raises(UnsupportedInput, match="already is a Hugging Face model folder"):
        open_training(folder)


def test_a_folder_in_which_deepspeed_has_its_own_files_is_left_to_its_format(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "global_step5").mkdir()
    (folder / "global_step5" / "mp_rank_00_model_states.pt").touch()
    assert not formats()["torch"].detect(folder)


def test_weights_that_a_trainer_gathered_from_fsdp_are_found_in_its_folder(tmp_path: Path) -> None:
    save(tmp_path / "pytorch_model_fsdp.bin", llama_state())
    assert set(open_training(tmp_path)) == set(llama_state())


# What is not the whole model


def test_a_partial_layer_is_refused(tmp_path: Path) -> None:
    state = llama_state()
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(MalformedInput, match=r"1.mlp.up_proj.weight"):
        open_training(save(tmp_path / "x.bin", state))


@pytest.mark.parametrize("part", ["model.norm.weight", "model.embed_tokens.weight", "input_layernorm.weight"])
def test_missing_keys_of_every_layer_or_of_the_model_are_refused(tmp_path: Path, part: str) -> None:
    state = {name: tensor for name, tensor in llama_state().items() if not name.endswith(part)}
    with pytest.raises(InputRefused):
        open_training(save(tmp_path / "x.bin", state))


def test_a_bias_that_the_configuration_does_not_have_is_refused(tmp_path: Path) -> None:
    state = llama_state() | {f"model.layers.{layer}.self_attn.q_proj.bias": torch.ones(8) for layer in range(2)}
    with pytest.raises(MalformedInput, match="does not have"):
        open_training(save(tmp_path / "x.bin", state))


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 3},
        {"vocab_size": 17},
        {"hidden_size": 16},
        {"num_key_value_heads": 2},
        {"intermediate_size": 13},
        {"model_type": "gpt2"},
    ],
    ids=str,
)
def test_a_configuration_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(MalformedInput):
        open_training(save(tmp_path / "x.bin", llama_state(), LLAMA | change))


def test_linear_layers_in_place_of_gpt2s_are_refused(tmp_path: Path) -> None:
    state = gpt2_base_state()
    state |= {name: tensor.t() for name, tensor in state.items() if name.endswith("c_attn.weight")}
    with pytest.raises(MalformedInput, match="another shape"):
        open_training(save(tmp_path / "x.bin", state, GPT2))


def test_tensors_outside_the_model_are_refused_or_left_out(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", llama_state() | {"v_head.summary.weight": torch.ones(1, 8)})
    with pytest.raises(UnsupportedInput, match="outside the model") as caught:
        open_training(path)
    assert "--drop" in caught.value.hint
    found = open_training(path, options={"drop": True})
    assert found.dropped == ("1 tensors outside the model: `v_head.summary.weight`",)


@pytest.mark.parametrize("name", ["qweight", "SCB", "weight.quant_state.bitsandbytes__nf4", "weight_scale_inv"])
def test_quantized_weights_are_refused(tmp_path: Path, name: str) -> None:
    state = llama_state() | {f"model.layers.0.mlp.up_proj.{name}": torch.ones(8)}
    with pytest.raises(UnsupportedInput, match="is quantized"):
        open_training(save(tmp_path / "x.bin", state))


def test_an_object_in_place_of_a_tensor_is_refused(tmp_path: Path) -> None:
    state = llama_state() | {"model.layers.0.mlp.up_proj.weight": date(2020, 1, 1)}
    with pytest.raises(UnsupportedInput, match="is an object"):
        open_training(save(tmp_path / "x.bin", state))


def test_lora_without_its_config_is_refused(tmp_path: Path) -> None:
    state = llama_state() | {"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 8)}
    with pytest.raises(MalformedInput, match="scale is unknown") as caught:
        open_training(save(tmp_path / "x.bin", state))
    assert "adapter_config.json" in caught.value.hint


def test_an_adapter_is_not_claimed(tmp_path: Path) -> None:
    lora = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 8)}
    path = save(tmp_path / "adapter_model.bin", lora, None)
    assert not any(found.detect(path) for found in formats().values())


def test_a_state_dict_of_another_trainer_is_not_claimed(tmp_path: Path) -> None:
    path = save(tmp_path / "mp_rank_00_model_states.pt", {"module": llama_state(), "ds_version": "0.14"})
    assert not formats()["torch"].detect(path)


def test_a_whole_pickled_object_is_reported(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(UnsupportedInput, match=r"whole object \(`torch.nn.modules.linear.Linear`\)"):
        open_training(tmp_path / "x.pt")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "pytorch_model.bin", llama_state())
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(InputRefused):
        open_training(tmp_path)
