"""NeMo's checkpoints, made here after its published layout: the same bits, and settings without a model are refused."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmconv.checkpoint import Checkpoint
from llmconv.convert.formats import formats
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, UnsupportedInput
from tests.builders.dcp_folders import save
from tests.builders.megatron_saves import (
    Shape,
    State,
    hugging_face_state,
    kept,
    rank_state,
    with_engine,
    with_old_names,
)
from tests.convert.formats.test_megatron import assert_same_bits

SHAPE = Shape(layers=2, qkv_bias=True)
NEMO = {
    "mcore_gpt": True,
    "encoder_seq_length": 64,
    "max_position_embeddings": "${.encoder_seq_length}",
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": None,
    "normalization": "rmsnorm",
    "layernorm_epsilon": 1e-6,
    "bias": False,
    "qkv_bias": True,
    "activation": "fast-swiglu",
    "headscale": False,
    "transformer_block_type": "pre_ln",
    "normalize_attention_scores": True,
    "attention_type": "multihead",
    "position_embedding_type": "rope",
    "rotary_percentage": 1.0,
    "rotary_base": 1000000.0,
    "share_embeddings_and_output_weights": False,
    "activations_checkpoint_granularity": "selective",
    "bias_activation_fusion": True,
    "masked_softmax_fusion": True,
    "get_attention_mask_from_fusion": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
}
"""`model_config.yaml` of NeMo 1."""

NEMO2 = {
    "_target_": "nemo.collections.llm.gpt.model.qwen2.Qwen2Config7B",
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "bias_activation_fusion": True,
    "ffn_hidden_size": 24,
    "gated_linear_unit": True,
    "hidden_size": 16,
    "layernorm_epsilon": 1e-6,
    "normalization": "RMSNorm",
    "num_attention_heads": 4,
    "num_layers": 2,
    "num_moe_experts": None,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "rotary_base": 1000000.0,
    "rotary_percent": 1.0,
    "seq_length": 64,
    "share_embeddings_and_output_weights": False,
}
"""The `config` in `context/model.yaml` of NeMo 2."""


def state() -> tuple[State, State]:
    """The model in Hugging Face's names, and in Megatron core's."""
    model = hugging_face_state(SHAPE)
    return model, rank_state(SHAPE, model, (0, 0, 0, 0))


def opened(folder: Path, **fields: Any) -> Checkpoint:
    config = folder.parent / "fields.json"
    config.write_text(json.dumps({"vocab_size": SHAPE.words} | fields))
    return open_training(folder, config=(config,))


def nemo1(tmp_path: Path, place: str = "model_weights.ckpt", names: Any = dict, **changes: Any) -> tuple[Path, State]:
    """An unpacked `.nemo`, and its model."""
    model, core = state()
    folder = tmp_path / "nemo"
    (folder / place).parent.mkdir(parents=True)
    torch.save({f"model.{name}": tensor for name, tensor in names(core).items()}, folder / place)
    (folder / "model_config.yaml").write_text(yaml.safe_dump(NEMO | changes))
    return folder, model


PLACES = ("model_weights.ckpt", "mp_rank_00/model_weights.ckpt", "tp_rank_00_pp_rank_000/model_weights.ckpt")


@pytest.mark.parametrize("place", PLACES)
def test_an_unpacked_nemo_file_gives_the_same_bits(tmp_path: Path, place: str) -> None:
    folder, model = nemo1(tmp_path, place, with_engine)
    assert [name for name, found in formats().items() if found.detect(folder)] == ["megatron"]
    found = opened(folder)
    assert_same_bits(found, kept(SHAPE, model))
    assert (found.config["model_type"], found.config["max_position_embeddings"]) == ("qwen2", 64)
    assert (found.config["rope_theta"], found.config["rms_norm_eps"]) == (1e6, 1e-6)


def test_names_of_before_megatron_core_give_the_same_bits(tmp_path: Path) -> None:
    model, core = state()
    folder, _ = nemo1(tmp_path)
    torch.save({"model": with_old_names(core)}, folder / "model_weights.ckpt")
    assert_same_bits(opened(folder), kept(SHAPE, model))


def test_distributed_weights_of_nemo_1_give_the_same_bits(tmp_path: Path) -> None:
    model, core = state()
    folder, _ = nemo1(tmp_path)
    (folder / "model_weights.ckpt").unlink()
    save(folder / "model_weights", {f"model.{name}": tensor for name, tensor in core.items()})
    assert_same_bits(opened(folder), kept(SHAPE, model))


def test_zarr_weights_of_nemo_1_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = nemo1(tmp_path)
    (folder / "model_weights").mkdir()
    with pytest.raises(InputRefused, match="metadata"):
        opened(folder)
    (folder / "model_weights/metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UnsupportedInput, match="`zarr`"):
        opened(folder)


def test_a_packed_nemo_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model, _ = state()
    folder, _ = nemo1(tmp_path)
    with tarfile.open(tmp_path / "x.nemo", "w") as archive:
        archive.add(folder, ".")
    with pytest.raises(UnsupportedInput) as caught:
        open_training(tmp_path / "x.nemo")
    command = caught.value.hint.split("`")[1]
    assert command == "mkdir x && tar -xf x.nemo -C x"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert_same_bits(opened(tmp_path / "x"), kept(SHAPE, model))


def test_a_file_inside_of_an_unpacked_nemo_file_says_to_give_the_folder(tmp_path: Path) -> None:
    folder, _ = nemo1(tmp_path)
    with pytest.raises(InputRefused, match="one file of a checkpoint") as caught:
        open_training(folder / "model_weights.ckpt")
    assert f"`{folder}`" in caught.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "geglu"},
        {"transformer_block_type": "post_ln"},
        {"headscale": True},
        {"megatron_legacy": True},
        {"normalize_attention_scores": False},
        {"mcore_customization_config": {"softmax_scale": 1.0}},
        {"position_embedding_type": "alibi"},
        {"use_attention_sinks": True},
    ],
    ids=str,
)
def test_a_setting_that_changes_the_model_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder, _ = nemo1(tmp_path, **changes)
    with pytest.raises(UnsupportedInput, match=f"`{next(iter(changes))}`"):
        opened(folder)


def nemo2(tmp_path: Path, **changes: Any) -> tuple[Path, State]:
    """A folder of NeMo 2, and its model."""
    model, core = state()
    folder = tmp_path / "nemo2"
    (folder / "context").mkdir(parents=True)
    save(folder / "weights", {f"module.{name}": tensor for name, tensor in core.items()})
    torch.save({"pytorch-lightning_version": "2.5"}, folder / "weights/common.pt")
    (folder / "weights/metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    described = {"_target_": "nemo.collections.llm.gpt.model.qwen2.Qwen2Model", "config": NEMO2 | changes}
    (folder / "context/model.yaml").write_text(yaml.safe_dump(described))
    return folder, model


def test_a_folder_of_nemo_2_gives_the_same_bits(tmp_path: Path) -> None:
    folder, model = nemo2(tmp_path)
    assert [name for name, found in formats().items() if found.detect(folder)] == ["megatron"]
    found = opened(folder)
    assert_same_bits(found, kept(SHAPE, model))
    assert (found.config["model_type"], found.config["rope_theta"]) == ("qwen2", 1e6)


def test_llama_3_1s_frequencies_are_read(tmp_path: Path) -> None:
    scaling = {"scale_factor": 32, "low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
    config = opened(nemo2(tmp_path, **scaling)[0]).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_divided_positions_are_read(tmp_path: Path) -> None:
    config = opened(nemo1(tmp_path, seq_len_interpolation_factor=2)[0]).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_func": {"_target_": "torch.nn.functional.gelu"}},
        {"multi_latent_attention": True},
        {"scale_factor": 8, "low_freq_factor": 2, "high_freq_factor": 4, "old_context_len": 8192},
        {"num_layers": None},
    ],
    ids=str,
)
def test_a_model_of_nemo_2_that_is_not_supported_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputRefused):
        opened(nemo2(tmp_path, **changes)[0])


def test_a_model_of_nemo_2_is_named_with_its_argument(tmp_path: Path) -> None:
    changes = {"_target_": "nemo.collections.llm.gpt.model.gemma2.Gemma2Config2B"}
    gelu = {"_target_": "nemo.collections.llm.fn.activation.openai_gelu", "_call_": False}
    with pytest.raises(
        UnsupportedInput, match="`model.yaml` of a `Gemma2Config2B` declares `activation_func` openai_gelu"
    ):
        opened(nemo2(tmp_path, **changes, activation_func=gelu)[0])


def test_a_window_is_read_as_nemo_2_writes_tuples(tmp_path: Path) -> None:
    window = {"_target_": "builtins.tuple", "_args_": [[8, 0]]}
    with pytest.raises(UnsupportedInput, match="no supported model has"):
        opened(nemo2(tmp_path, window_size=window)[0])


@pytest.mark.parametrize("name", ["window_size", "rotary_base", "softmax_scale", "rope_of_the_future"])
def test_an_argument_that_is_a_call_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputRefused, match=name):
        opened(nemo2(tmp_path, **{name: {"_target_": "my.function"}})[0])


def test_megatron_bridges_run_config_is_read(tmp_path: Path) -> None:
    folder, model = nemo2(tmp_path)
    place = tmp_path / "run/iter_0000010"
    place.parent.mkdir()
    (folder / "weights").rename(place)
    (place / "run_config.yaml").write_text(
        yaml.safe_dump({"model": NEMO2 | {"activation_func": "torch.nn.functional.silu"}})
    )
    assert_same_bits(opened(tmp_path / "run"), kept(SHAPE, model))


def test_the_tokenizer_of_nemo_2_decides_the_vocabulary(tmp_path: Path) -> None:
    folder, model = nemo2(tmp_path)
    home = folder / "context/nemo_tokenizer"
    home.mkdir()
    vocabulary = {f"t{number}": number for number in range(SHAPE.words)}
    (home / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    found = open_training(folder)
    assert_same_bits(found, kept(SHAPE, model))
    assert any("2 rows of the embedding were cut off" in warning for warning in found.warnings)
