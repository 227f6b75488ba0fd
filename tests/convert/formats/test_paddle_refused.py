"""PaddleNLP checkpoints that are refused: what is missing, damaged, of another model, or no model at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.builders.paddle_models import CONFIG, FIXTURES, cut, save, save_whole, whole_model


def test_a_missing_last_rank_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "tp2_llama" / "sharded", tmp_path / "x")
    (folder / "model_state.tp01.pdparams").unlink()
    with pytest.raises(
        MalformedInput, match="lacks the files of 1 of 2 ranks, the first is tensor-parallel 1, pipeline 0"
    ):
        to_hf(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(("stage", "reason"), [("pp00", "lacks the files of 1 of 2"), ("pp01", "10 missing keys")])
def test_a_missing_stage_is_refused(tmp_path: Path, stage: str, reason: str) -> None:
    folder = shutil.copytree(FIXTURES / "pp2_llama" / "sharded", tmp_path / "x")
    (folder / f"model_state.{stage}.pdparams").unlink()
    with pytest.raises(MalformedInput, match=reason):
        open_training(folder)


def test_a_missing_rank_that_the_config_does_not_tell_is_seen_by_the_shapes(tmp_path: Path) -> None:
    files = {"model_state.tp00.pdparams": cut(whole_model(), 2, 0, 2)}
    with pytest.raises(MalformedInput, match=r"expected \[16, 8\], got \[8, 8\]"):
        open_training(save(tmp_path / "x", files))


def test_one_file_of_several_is_refused() -> None:
    with pytest.raises(InputRefused, match="one of several files"):
        open_training(FIXTURES / "tp2_llama" / "sharded" / "model_state.tp00.pdparams")


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "llama_sharded", tmp_path / "x")
    (folder / "model_state-00002-of-00005.pdparams").unlink()
    with pytest.raises(MalformedInput, match=r"`model_state-00002-of-00005\.pdparams` is missing"):
        open_training(folder)


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "llama_sharded", tmp_path / "x")
    index = folder / "model_state.pdparams.index.json"
    index.write_text(index.read_text().replace("model_state-00002", "../model_state-00002"))
    with pytest.raises(MalformedInput, match="invalid shard name"):
        open_training(folder)


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "llama_sharded", tmp_path / "x")
    (folder / "model_state.pdparams.index.json").unlink()
    with pytest.raises(MalformedInput, match="has shards, but no"):
        open_training(folder)


def test_weights_of_two_kinds_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "tp2_llama" / "sharded", tmp_path / "x")
    shutil.copy(FIXTURES / "llama_gqa_fp32" / "model_state.pdparams", folder)
    with pytest.raises(InputRefused, match="contains its weights more than once"):
        open_training(folder)


def test_a_truncated_file_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "llama_gqa_fp32", tmp_path / "x")
    data = (folder / "model_state.pdparams").read_bytes()
    for size in (len(data) - 1, len(data) // 2, 200):
        (folder / "model_state.pdparams").write_bytes(data[:size])
        with pytest.raises(MalformedInput, match="truncated"):
            to_hf(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_lora_is_sent_to_merge_lora() -> None:
    with pytest.raises(UnsupportedInput, match=r"LoRA adapter \(`lora_model_state\.pdparams`\)") as refusal:
        open_training(FIXTURES / "lora_llama" / "lora")
    assert "merge-lora" in refusal.value.hint


def test_a_prefix_is_named() -> None:
    with pytest.raises(UnsupportedInput, match="is a prefix"):
        open_training(FIXTURES / "prefix_llama_bf16" / "prefix")


def test_an_optimizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shutil.copy(FIXTURES / "opt_322.pdopt", tmp_path)
    with pytest.raises(UnsupportedInput, match="state of an optimizer"):
        open_training(tmp_path / "opt_322.pdopt")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown architecture": ({"model_type": "jamba"}, "model of the unsupported type `jamba`"),
    "one without an equal": ({"model_type": "chatglm"}, "ChatGLM-6B v1 has two rotary positions per token"),
    "no architecture": ({"model_type": None}, "model of the unsupported type `None`"),
    "a list for a name": ({"model_type": ["llama"]}, "unsupported type"),
    "ALiBi": ({"alibi": True}, r"Llama with ALiBi \(such as Baichuan-13B\): transformers has no such model"),
    "a long-sequence strategy": ({"use_long_sequence_strategies": True}, "cannot express"),
    "unknown rope": ({"rope_scaling_type": "yarn"}, "unsupported `rope_scaling_type` `yarn`"),
    "another hidden size": ({"hidden_size": 16}, r"expected \[16, 16\]"),
    "another vocabulary": ({"vocab_size": 17}, r"expected \[17, 8\]"),
    "more layers": ({"num_hidden_layers": 3}, "9 missing keys"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "more than any model has"),
    "fewer layers": ({"num_hidden_layers": 1}, "9 unexpected keys"),
    "odd heads": ({"num_key_value_heads": 3}, "4 query heads for key/value heads 3"),
    "text for a number": ({"hidden_size": "8"}, "`hidden_size` in the configuration of `x` is invalid"),
    "text for a real": ({"rms_norm_eps": "1e-6"}, "`rms_norm_eps` in the configuration of `x` is invalid"),
    "no head": ({"hidden_size": 0}, "`hidden_size` in the configuration of `x` is invalid"),
}


@pytest.mark.slow_rows("another hidden size")
@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_config_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    folder = save_whole(tmp_path / "x", whole_model(), **change)
    with pytest.raises(InputRefused, match=reason):
        open_training(folder)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    model = whole_model()
    model["llama.layers.0.mlp.up_proj.quant_weight"] = model.pop("llama.layers.0.mlp.up_proj.weight").astype("i1")
    with pytest.raises(UnsupportedInput, match="is quantized"):
        open_training(save_whole(tmp_path / "x", model))


def test_a_static_graph_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.pdiparams").write_bytes(b"weights")
    with pytest.raises(UnsupportedInput, match="static graph of Paddle"):
        open_training(tmp_path)


def test_hugging_faces_names_in_paddles_safetensors_are_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"paddlenlp_version": None}))
    save_file({"model.norm.weight": np.ones(2, "f4")}, tmp_path / "model.safetensors", metadata={"format": "np"})
    assert not formats()["paddle"].detect(tmp_path)


def test_an_unknown_model_of_paddle_is_claimed_and_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "ernie", "paddlenlp_version": null}')
    save_file({"ernie.norm.weight": np.ones(2, "f4")}, tmp_path / "model.safetensors", metadata={"format": "np"})
    with pytest.raises(UnsupportedInput, match="transformers has ERNIE only as an encoder"):
        open_training(tmp_path)


def test_a_baichuan_7b_is_a_llama(tmp_path: Path) -> None:
    checkpoint = open_training(save_whole(tmp_path / "x", whole_model(), model_type="baichuan"))
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]


def test_a_split_chatglm_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "chatglm_v2", tmp_path / "x")
    shutil.copy(folder / "model_state.pdparams", folder / "model_state.tp01.pdparams")
    (folder / "model_state.pdparams").rename(folder / "model_state.tp00.pdparams")
    with pytest.raises(UnsupportedInput, match="chatglm_v2 split over 2 tensor-parallel ranks"):
        open_training(folder)
