"""Megatron checkpoints that are refused: missing and mixed ranks, arguments without a model, other containers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmconv.convert import to_hf
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.builders.megatron_saves import Shape, hugging_face_state, save_megatron, with_grouped_experts, with_old_names
from tests.builders.torch_states import FIXTURES

FOLDER = FIXTURES / "megatron"
SHAPE = Shape(layers=2, tensor=2, pipeline=2)


def save(tmp_path: Path, shape: Shape = SHAPE, **changes: Any) -> Path:
    return save_megatron(tmp_path / "run", shape, hugging_face_state(shape), **changes)


def refusal(tmp_path: Path, run: Path, **fields: Any) -> InputRefused:
    """The error of opening a run; nothing stays of the output."""
    config = tmp_path / "fields.json"
    config.write_text(json.dumps({"vocab_size": SHAPE.words} | fields))
    with pytest.raises(InputRefused) as caught:
        to_hf(run, tmp_path / "hf", config=[config])
    assert not (tmp_path / "hf").exists()
    assert "\n" not in caught.value.message
    return caught.value


def change(run: Path, rank: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    file = run / "iter_0000007" / rank / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    edit(content)
    torch.save(content, file)


@pytest.mark.parametrize(
    ("rank", "match"),
    [
        ("mp_rank_00_001", "do not have the same parts"),
        ("mp_rank_01_000", "do not have the same parts"),
    ],
)
def test_one_missing_rank_is_refused(tmp_path: Path, rank: str, match: str) -> None:
    run = save(tmp_path)
    shutil.rmtree(run / "iter_0000007" / rank)
    assert match in refusal(tmp_path, run).message


@pytest.mark.parametrize(("ranks", "kind"), [("mp_rank_01_*", "tensor"), ("mp_rank_*_001", "pipeline")])
def test_missing_ranks_are_named(tmp_path: Path, ranks: str, kind: str) -> None:
    run = save(tmp_path)
    for folder in (run / "iter_0000007").glob(ranks):
        shutil.rmtree(folder)
    assert f"2 {kind}-parallel ranks; rank 1 is missing" in refusal(tmp_path, run).message


def test_a_missing_expert_rank_is_named(tmp_path: Path) -> None:
    run = save(tmp_path, Shape(layers=2, experts=4, expert=2))
    shutil.rmtree(run / "iter_0000007" / "mp_rank_00_000")
    assert "expert-parallel ranks; rank 0 is missing" in refusal(tmp_path, run).message


def test_one_file_of_several_ranks_is_refused(tmp_path: Path) -> None:
    run = save(tmp_path)
    error = refusal(tmp_path, run / "iter_0000007/mp_rank_00_000/model_optim_rng.pt")
    assert "rank 1 is missing" in error.message and "`iter_…`" in error.hint


@pytest.mark.parametrize("rank", ["mp_rank_00_000", "mp_rank_01_001"])
def test_the_folder_of_a_rank_is_refused_with_the_folder_to_give(tmp_path: Path, rank: str) -> None:
    place = save(tmp_path) / "iter_0000007"
    problem = refusal(tmp_path, place / rank)
    assert f"`{rank}` is the folder of one rank" in problem.message
    assert problem.hint == f"give the folder above it: `{place}`"


def test_the_current_folder_is_recognized_as_that_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = save(tmp_path) / "iter_0000007"
    monkeypatch.chdir(place / "mp_rank_00_000")
    problem = refusal(tmp_path, Path("."))
    assert "`mp_rank_00_000` is" in problem.message and f"`{place}`" in problem.hint


def test_ranks_of_another_iteration_are_refused(tmp_path: Path) -> None:
    run = save(tmp_path)
    change(run, "mp_rank_01_001", lambda content: content.update(iteration=8))
    assert "of different saves: `iteration` `7`, `8`" in refusal(tmp_path, run).message


def test_ranks_with_other_arguments_are_refused(tmp_path: Path) -> None:
    run = save(tmp_path)
    change(run, "mp_rank_01_001", lambda content: setattr(content["args"], "hidden_size", 32))
    assert "of different saves: `hidden_size` `16`, `32`" in refusal(tmp_path, run).message


def test_more_ranks_than_the_run_had_are_refused(tmp_path: Path) -> None:
    run = save(tmp_path)
    shutil.copytree(run / "iter_0000007/mp_rank_01_000", run / "iter_0000007/mp_rank_02_000")
    assert "has a rank 2" in refusal(tmp_path, run).message


def test_ranks_of_two_runs_are_refused(tmp_path: Path) -> None:
    run = save(tmp_path)
    shutil.copytree(run / "iter_0000007/mp_rank_01_000", run / "iter_0000007/mp_rank_01")
    assert "ranks of two runs" in refusal(tmp_path, run).message


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.input_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.weight"]
)
def test_copies_that_differ_are_refused(tmp_path: Path, name: str) -> None:
    run = save(tmp_path)
    change(run, "mp_rank_01_000", lambda content: content["model"][name].add_(1))
    assert f"different copies of `{name}`" in refusal(tmp_path, run).message


def test_a_tied_embedding_that_differs_in_the_last_stage_is_refused(tmp_path: Path) -> None:
    run = save(tmp_path, Shape(layers=2, pipeline=2, tied=True))
    change(run, "mp_rank_00_001", lambda content: content["model"]["output_layer.weight"].add_(1))
    assert "hold different embeddings" in refusal(tmp_path, run).message


def test_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    run = save(tmp_path, Shape(layers=2, experts=4, expert=2), num_experts=2)
    assert "each rank has 1 experts" in refusal(tmp_path, run).message


@pytest.mark.parametrize("kind", ["sinkhorn", ["aux_loss", "sinkhorn"]], ids=str)
def test_experts_that_are_weighted_otherwise_are_refused(tmp_path: Path, kind: Any) -> None:
    run = save(tmp_path, Shape(layers=2, experts=4), moe_router_load_balancing_type=kind)
    assert "`moe_router_load_balancing_type`" in refusal(tmp_path, run).message


def test_experts_that_drop_tokens_are_reported(tmp_path: Path) -> None:
    run = save(tmp_path, Shape(layers=2, experts=4), moe_expert_capacity_factor=1.25)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": SHAPE.words}))
    found = open_training(run, config=(tmp_path / "config.json",))
    assert any("`moe_expert_capacity_factor` drops tokens" in warning for warning in found.warnings)


def test_grouped_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    shape = Shape(layers=2, experts=4)
    run = save_megatron(tmp_path / "run", shape, hugging_face_state(shape), with_grouped_experts, num_experts=5)
    assert "does not hold 5 experts" in refusal(tmp_path, run).message


def test_a_stage_without_a_layer_is_refused(tmp_path: Path) -> None:
    run = save(tmp_path, Shape(layers=2))
    change(run, "mp_rank_00", lambda content: renumber(content["model"]))
    assert "lacks its layer 1" in refusal(tmp_path, run).message


def renumber(model: dict[str, Any]) -> None:
    for name in [name for name in model if ".layers.1." in name]:
        model[name.replace(".layers.1.", ".layers.5.")] = model.pop(name)


def test_fewer_layers_than_the_arguments_are_refused(tmp_path: Path) -> None:
    run = save(tmp_path, Shape(layers=2), num_layers=3)
    assert "has 2 layers, its configuration says 3" in refusal(tmp_path, run).message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"spec": ["my.module", "layer_spec"]}, "spec"),
        ({"squared_relu": True}, "squared_relu"),
        ({"moe_router_score_function": "tanh"}, "moe_router_score_function"),
        ({"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type"),
        ({"normalization": "ScaleNorm"}, "normalization"),
        ({"no_rope_freq": 4}, "no_rope_freq"),
        ({"rotary_percent": 0.5}, "rotary_percent"),
        ({"window_size": (8, 8)}, "window_size"),
        ({"attention_of_the_future": True}, "attention_of_the_future"),
        ({"mtp_new_trick": 3, "softmax_trick": "on"}, "softmax_trick"),
        ({"softmax_scale": 0.5}, "softmax_scale"),
        ({"rotary_seq_len_interpolation_factor": 2}, "rotary_seq_len_interpolation_factor"),
        ({"hybrid_layer_pattern": "M*"}, "hybrid_layer_pattern"),
    ],
    ids=str,
)
def test_an_argument_that_changes_the_model_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    error = refusal(tmp_path, save(tmp_path, Shape(layers=2), **changes))
    assert isinstance(error, UnsupportedInput) and f"`{named}`" in error.message


def test_an_argument_that_the_old_model_ignores_is_refused(tmp_path: Path) -> None:
    shape = Shape(layers=2)
    run = save_megatron(tmp_path / "run", shape, hugging_face_state(shape), with_old_names, rotary_base=500000)
    assert "`rotary_base` 500000" in refusal(tmp_path, run).message


def test_an_unknown_argument_is_reported_where_the_model_is_described(tmp_path: Path) -> None:
    run = save(tmp_path, Shape(layers=2), attention_of_the_future=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 30}))
    found = open_training(run, config=(config,))
    assert any("attention_of_the_future" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": "2"},
        {"num_layers": -1},
        {"hidden_size": True},
        {"swiglu": 1},
        {"num_query_groups": 3},
        {"norm_epsilon": float("nan")},
        {"rotary_base": 0},
        {"window_size": "8"},
        {"tensor_model_parallel_size": 10**12},
        {"num_attention_heads": 3, "num_query_groups": 3},
        {"kv_channels": 5},
        {"kv_channels": 1 << 30, "qk_layernorm": True, "rotary_interleaved": True},
        {"num_experts": 2, "moe_layer_freq": 2, "num_layers": 1 << 30},
        {"num_experts": 2, "moe_layer_freq": [1]},
        {"hidden_size": 32},
    ],
    ids=str,
)
def test_arguments_of_another_kind_or_model_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert isinstance(refusal(tmp_path, save(tmp_path, Shape(layers=2), **changes)), InputRefused)


@pytest.mark.parametrize(
    "changes",
    [{"add_bias_linear": True}, {"swiglu": False}, {"normalization": "LayerNorm"}, {"qk_layernorm": True}],
    ids=str,
)
def test_arguments_without_a_model_or_without_its_tensors_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    refusal(tmp_path, save(tmp_path, Shape(layers=2), **changes))


@pytest.mark.parametrize(
    "fields",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_theta": 5.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
        {"num_key_value_heads": 4},
        {"tie_word_embeddings": True},
        {"model_type": "gpt_neox"},
    ],
    ids=str,
)
def test_a_config_that_contradicts_the_arguments_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert "--config" in refusal(tmp_path, save(tmp_path, Shape(layers=2)), **fields).message


def test_without_arguments_a_config_is_asked_for(tmp_path: Path) -> None:
    run = save(tmp_path, Shape(layers=2))
    change(run, "mp_rank_00", lambda content: content.pop("args"))
    assert "`config.json`" in refusal(tmp_path, run).hint


def test_a_padded_vocabulary_of_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="32 rows, and it does not contain how many") as caught:
        open_training(save(tmp_path, Shape(layers=2)))
    assert "`--tokenizer`" in caught.value.hint


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    assert "40 tokens" in refusal(tmp_path, save(tmp_path, Shape(layers=2)), vocab_size=40).message


def test_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    run = save(tmp_path, Shape(layers=2))
    change(run, "mp_rank_00", lambda content: content["model"].update({"adapter.weight": torch.ones(2)}))
    assert "unexpected keys: `adapter.weight`" in refusal(tmp_path, run).message


def test_an_object_in_place_of_a_tensor_is_refused(tmp_path: Path) -> None:
    run = save(tmp_path, Shape(layers=2))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    change(run, "mp_rank_00", lambda content: content["model"].update({name: Shape()}))
    assert "is an object, not a plain tensor" in refusal(tmp_path, run).message


def test_several_saves_without_a_tracker_file_are_refused(tmp_path: Path) -> None:
    run = save(tmp_path)
    shutil.copytree(run / "iter_0000007", run / "iter_0000008")
    (run / "latest_checkpointed_iteration.txt").unlink()
    assert "2 saves and no `latest_checkpointed_iteration.txt`" in refusal(tmp_path, run).message


@pytest.mark.parametrize("word", ["9", "", "../..", "release", "9" * 5000])
def test_a_tracker_file_that_names_no_save_is_refused(tmp_path: Path, word: str) -> None:
    run = save(tmp_path)
    (run / "latest_checkpointed_iteration.txt").write_text(word)
    assert isinstance(refusal(tmp_path, run), MalformedInput)


def test_zarr_is_refused_by_name(tmp_path: Path) -> None:
    place = tmp_path / "run/iter_0000007"
    place.mkdir(parents=True)
    (place / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    assert "format `zarr`" in refusal(tmp_path, tmp_path / "run").message


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "common.pt"])
def test_an_incomplete_distributed_save_is_refused(tmp_path: Path, file: str) -> None:
    run = shutil.copytree(FOLDER / "qwen2_torch_dist", tmp_path / "run")
    (run / "iter_0000100" / file).unlink()
    refusal(tmp_path, run)
