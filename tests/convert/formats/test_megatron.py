"""Megatron checkpoints: genuine ones give Megatron's logits, and every grid of ranks gives the model's bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmconv.checkpoint import Checkpoint
from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.inspection import inspect
from llmconv.convert.opening import open_training
from tests.builders.megatron_saves import (
    Shape,
    State,
    hugging_face_state,
    kept,
    save_megatron,
    with_engine,
    with_grouped_experts,
    with_old_names,
)
from tests.builders.torch_states import FIXTURES

FOLDER = FIXTURES / "megatron"
CASES = {
    "deepseek_v2_tp2": "deepseek_v2",
    "deepseek_v3_tp2_ep2": "deepseek_v3",
    "glm4_moe_torch_dist": "glm4_moe",
    "gpt2_tp2": "gpt2",
    "llama_tp2_pp2": "llama",
    "llama_virtual_stages": "llama",
    "llama31_interleaved_tp2": "qwen3",
    "mixtral_torch_dist": "mixtral",
    "neox_torch_dist": "gpt_neox",
    "qwen2_torch_dist": "qwen2",
    "qwen3_moe_tp2_ep2": "qwen3_moe",
    "qwen3_single_tensors": "qwen3",
}
"""Genuine checkpoints to the model that they become."""


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A configuration with the size of the fixtures' vocabulary."""
    path = tmp_path / "vocabulary.json"
    path.write_text('{"vocab_size": 90}')
    return path


@pytest.mark.slow_rows("deepseek_v2_tp2", "glm4_moe_torch_dist", "gpt2_tp2", "mixtral_torch_dist", "qwen3_moe_tp2_ep2")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_megatron(tmp_path: Path, words: Path, logits_of: Callable[..., Any], case: str) -> None:
    to_hf(FOLDER / case, tmp_path / "hf", config=[words])
    with np.load(FOLDER / case / "reference.npz") as reference:
        assert np.abs(logits_of(tmp_path / "hf", reference["input_ids"]) - reference["logits"]).max() < 2e-5


@pytest.mark.parametrize("case", CASES)
def test_only_this_format_claims_the_run_and_its_save(words: Path, case: str) -> None:
    for path in (FOLDER / case, FOLDER / case / "iter_0000100"):
        assert [name for name, found in formats().items() if found.detect(path)] == ["megatron"]
    assert open_training(FOLDER / case, config=(words,)).config["model_type"] == CASES[case]


def test_a_file_of_a_rank_is_claimed_by_its_content(tmp_path: Path) -> None:
    file = FOLDER / "gpt2_tp2/iter_0000100/mp_rank_00/model_optim_rng.pt"
    copy = Path(shutil.copy(file, tmp_path / "x.pt"))
    for path in (file, copy):
        assert [name for name, found in formats().items() if found.detect(path)] == ["megatron"]


def test_inspect_shows_core_names_without_a_vocabulary() -> None:
    shown = inspect(FOLDER / "llama_tp2_pp2").summary()
    assert "megatron" in json.dumps(shown, default=str)


def opened(tmp_path: Path, run: Path, **fields: Any) -> Checkpoint:
    """The converted checkpoint of a run, with the size of its vocabulary."""
    config = tmp_path / f"{run.name}.json"
    config.write_text(json.dumps({"vocab_size": Shape().words} | fields))
    return open_training(run, config=(config,))


def assert_same_bits(found: Checkpoint, expected: State) -> None:
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.shape == tuple(expected[name].shape)
        bits = expected[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        assert tensor.read().reshape(-1).view(np.uint8).tobytes() == bits.tobytes(), name


GRIDS = {
    "one rank": Shape(),
    "tensor": Shape(tensor=2),
    "pipeline": Shape(pipeline=2),
    "tensor and pipeline": Shape(tensor=2, pipeline=4, tied=True),
    "virtual stages": Shape(pipeline=2, virtual=2),
    "bfloat16": Shape(tensor=2, dtype=torch.bfloat16),
    "qwen2": Shape(tensor=2, qkv_bias=True, tied=True),
    "qwen3": Shape(tensor=2, pipeline=2, qk_norm=True),
    "mixtral": Shape(experts=4, expert=2),
    "mixtral, tensor, pipeline, expert": Shape(experts=4, tensor=2, pipeline=2, expert=4),
    "mixtral, whole experts": Shape(experts=4, tensor=2, expert=2, expert_tensor=1),
    "qwen3 with experts": Shape(experts=4, tensor=2, expert=2, qk_norm=True),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("names", [dict, with_engine], ids=["core", "engine"])
def test_every_grid_gives_the_same_bits(tmp_path: Path, grid: str, names: Callable[[State], Any]) -> None:
    shape = GRIDS[grid]
    state = hugging_face_state(shape)
    run = save_megatron(tmp_path / "run", shape, state, names)
    assert_same_bits(opened(tmp_path, run), kept(shape, state))


@pytest.mark.parametrize("grid", ["mixtral", "mixtral, tensor, pipeline, expert", "qwen3 with experts"])
def test_experts_in_two_matrices_give_the_same_bits(tmp_path: Path, grid: str) -> None:
    shape = GRIDS[grid]
    state = hugging_face_state(shape)
    run = save_megatron(tmp_path / "run", shape, state, with_grouped_experts)
    assert_same_bits(opened(tmp_path, run), kept(shape, state))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([(4, 4), (4, 2), (8, 4), (8, 8)]),
    st.sampled_from([0, 2, 4]),
    st.booleans(),
)
def test_any_grid_and_heads_give_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory,
    tensor: int,
    pipeline: int,
    expert: int,
    heads: tuple[int, int],
    experts: int,
    tied: bool,
) -> None:
    tensor = min(tensor, heads[1])
    shape = Shape(
        layers=2,
        hidden=heads[0] * 2,
        heads=heads[0],
        groups=heads[1],
        inner=8,
        experts=experts,
        tied=tied,
        tensor=tensor,
        pipeline=pipeline,
        expert=expert if experts else 1,
    )
    state, folder = hugging_face_state(shape), tmp_path_factory.mktemp("grid")
    assert_same_bits(opened(folder, save_megatron(folder / "run", shape, state)), kept(shape, state))


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_old_names_and_row_orders_give_the_same_bits(tmp_path: Path, version: float) -> None:
    shape = Shape(groups=4, tensor=2, pipeline=2)
    state = hugging_face_state(shape)

    def old(own: State) -> dict[str, Any]:
        for name in [name for name in own if "linear_qkv" in name]:
            own[name] = in_order_of(version, own[name], shape)
        return with_old_names(own)

    run = save_megatron(tmp_path / "run", shape, state, old, version, use_rotary_position_embeddings=True)
    assert_same_bits(opened(tmp_path, run), kept(shape, state))


def in_order_of(version: float, fused: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Rows of `[heads, 3, dim]` as Megatron-LM's `fix_query_key_value_ordering` expects them of a version."""
    rows = fused.reshape(-1, 3, shape.dim, shape.hidden)
    order = {0: (1, 0, 2, 3), 1.0: (0, 2, 1, 3)}.get(version, (0, 1, 2, 3))
    return rows.permute(*order).reshape(fused.shape).contiguous()


def test_interleaved_rotary_rows_become_halves(tmp_path: Path) -> None:
    shape = Shape(qk_norm=True)
    state = hugging_face_state(shape)
    run = save_megatron(tmp_path / "run", shape, state, rotary_interleaved=True)
    found, name = opened(tmp_path, run), "model.layers.0.self_attn.q_proj.weight"
    halves = state[name].reshape(shape.heads, shape.dim // 2, 2, shape.hidden).transpose(1, 2)
    assert torch.equal(torch.tensor(found[name].read()), halves.reshape(-1, shape.hidden))
    norm = "model.layers.0.self_attn.k_norm.weight"
    assert torch.equal(torch.tensor(found[norm].read()), state[norm].reshape(-1, 2).T.reshape(-1))


def test_norms_around_zero_get_their_one(tmp_path: Path) -> None:
    shape = Shape(dtype=torch.bfloat16)
    state = hugging_face_state(shape)
    run = save_megatron(tmp_path / "run", shape, state, apply_layernorm_1p=True)
    found, name = opened(tmp_path, run), "model.layers.1.input_layernorm.weight"
    assert found[name].read().astype(np.float32).tolist() == (state[name].float() + 1).bfloat16().float().tolist()
    assert any("`--dtype float32`" in warning for warning in found.warnings)
    to_hf(run, tmp_path / "hf", config=[tmp_path / "run.json"], dtype="float32")
    exact = open_training(tmp_path / "hf", rewrite=True)[name].read()
    assert exact.tolist() == (state[name].float() + 1).tolist()


def test_a_window_counts_the_token_itself(tmp_path: Path) -> None:
    shape = Shape()
    run = save_megatron(tmp_path / "run", shape, hugging_face_state(shape), window_size=(7, 0))
    config = opened(tmp_path, run).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 8)


def test_a_config_may_name_another_model_that_computes_the_same(tmp_path: Path) -> None:
    shape = Shape()
    run = save_megatron(tmp_path / "run", shape, hugging_face_state(shape))
    assert opened(tmp_path, run, model_type="mistral").config["model_type"] == "mistral"


def test_the_newest_save_is_the_one_of_the_tracker_file(tmp_path: Path) -> None:
    shape = Shape()
    run = save_megatron(tmp_path / "run", shape, state := hugging_face_state(shape))
    shutil.copytree(run / "iter_0000007", run / "iter_0000009")
    assert_same_bits(opened(tmp_path, run), kept(shape, state))


def test_a_release_has_no_iteration(tmp_path: Path) -> None:
    shape = Shape()
    run = save_megatron(tmp_path / "run", shape, state := hugging_face_state(shape))
    (run / "iter_0000007").rename(run / "release")
    (run / "latest_checkpointed_iteration.txt").write_text("release")
    assert_same_bits(opened(tmp_path, run), kept(shape, state))


def test_a_config_replaces_missing_arguments(tmp_path: Path) -> None:
    shape = Shape(tensor=2)
    run = save_megatron(tmp_path / "run", shape, state := hugging_face_state(shape))
    for file in run.rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        torch.save({**content, "args": None}, file)
    own = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        "tie_word_embeddings": False,
    }
    found = opened(tmp_path, run, **own)
    assert_same_bits(found, kept(shape, state))
    assert found.config["rope_parameters"] == own["rope_parameters"] and "rope_theta" not in found.config


def test_a_yaml_file_of_arguments_replaces_missing_ones(tmp_path: Path) -> None:
    shape = Shape(layers=2)
    run = save_megatron(tmp_path / "run", shape, state := hugging_face_state(shape))
    file = run / "iter_0000007/mp_rank_00/model_optim_rng.pt"
    torch.save({**torch.load(file, weights_only=False), "args": None}, file)
    plain = {name: value for name, value in vars(shape.arguments()).items() if name != "params_dtype"}
    arguments = tmp_path / "run.yaml"
    arguments.write_text(yaml.safe_dump(plain | {"vocab_size": shape.words}))
    assert_same_bits(open_training(run, config=(arguments,)), kept(shape, state))


def test_weights_are_read_only_when_they_are_written(tmp_path: Path) -> None:
    shape = replace(GRIDS["mixtral, tensor, pipeline, expert"])
    run = save_megatron(tmp_path / "run", shape, hugging_face_state(shape))
    found = opened(tmp_path, run)
    for file in run.rglob("model_optim_rng.pt"):
        file.unlink()
    assert found["model.norm.weight"].shape == (shape.hidden,)
    with pytest.raises(OSError):
        found["model.norm.weight"].read()
