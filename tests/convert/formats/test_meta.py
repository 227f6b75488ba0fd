"""Meta checkpoints: genuine ones give the upstream's logits, any split the same tensors, a wrong set a refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import to_hf
from llmconv.convert.formats.meta import intermediate_of
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.errors import MalformedInput

CASES = {
    "llama2_mha_mp2_bf16_ropefreqs": "llama-2-13b",
    "llama2_gqa_mp2_bf16": "",
    "llama3_gqa_mp1_bf16": "",
    "llama3_1_scaled_mp2_bf16": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_upstream_model(
    meta: Path, tmp_path: Path, logits_of: Callable[..., Any], case: str
) -> None:
    to_hf(meta / case / CASES[case], tmp_path / "hf")
    with np.load(meta / case / "reference.npz") as reference:
        short = logits_of(tmp_path / "hf", reference["tokens"])
        assert np.abs(short - reference["logits"]).max() < 1e-5
        long = logits_of(tmp_path / "hf", reference["tokens_long"])[:, -8:]
        assert np.abs(long - reference["logits_long"]).max() < 1e-5


def test_the_config_agrees_with_params_and_weights(meta: Path, tmp_path: Path) -> None:
    to_hf(meta / "llama3_1_scaled_mp2_bf16", tmp_path / "hf")
    config = open_checkpoint(tmp_path / "hf").config
    assert (config["torch_dtype"], config["vocab_size"], config["intermediate_size"]) == ("bfloat16", 576, 224)
    assert (config["num_key_value_heads"], config["rope_theta"], config["rms_norm_eps"]) == (2, 500000.0, 1e-5)
    assert (config["rope_scaling"]["rope_type"], config["rope_scaling"]["factor"]) == ("llama3", 8.0)
    assert (config["bos_token_id"], config["eos_token_id"]) == (320, 321)


def test_generation_stops_at_every_token_that_ends_a_turn(meta: Path) -> None:
    files = open_training(meta / "llama3_1_scaled_mp2_bf16").side_files
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 320, "eos_token_id": [321, 328, 329]}


def test_the_tokenizer_is_found_one_folder_up(meta: Path) -> None:
    assert "tokenizer.model" in open_training(meta / "llama2_mha_mp2_bf16_ropefreqs" / "llama-2-13b").side_files


def test_a_missing_tokenizer_is_a_warning_and_can_be_given(meta: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(meta / "llama2_gqa_mp2_bf16", tmp_path / "x" / "model")
    (folder / "tokenizer.model").unlink()
    assert any("has no tokenizer" in warning for warning in open_training(folder).warnings)
    given = open_training(folder, tokenizer=meta / "llama2_gqa_mp2_bf16" / "tokenizer.model")
    assert "tokenizer.json" in given.side_files and given.config["bos_token_id"] == 1


FORMULA = [
    ((4096, None, 256), 11008),
    ((5120, None, 256), 13824),
    ((6656, None, 256), 17920),
    ((8192, None, 256), 22016),
    ((8192, 1.3, 4096), 28672),
    ((4096, 1.3, 1024), 14336),
    ((16384, 1.2, 4096), 53248),
    ((2048, 1.5, 256), 8192),
    ((3072, 1.0, 256), 8192),
]


@pytest.mark.parametrize(("sizes", "expected"), FORMULA)
def test_released_models_have_their_feed_forward_size(sizes: tuple[int, float | None, int], expected: int) -> None:
    dim, multiplier, multiple = sizes
    params = {"dim": dim, "multiple_of": multiple} | ({"ffn_dim_multiplier": multiplier} if multiplier else {})
    assert intermediate_of(params) == expected


# Checkpoints made here: one whole model, cut as fairscale cuts

PARAMS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 4,
    "multiple_of": 16,
    "norm_eps": 1e-5,
    "vocab_size": -1,
}
HEAD_DIM = 4
COLUMNS = ("wo.weight", "w2.weight")


def whole_model(**changes: Any) -> dict[str, torch.Tensor]:
    """A seeded model in Meta's names, not split."""
    params = {**PARAMS, **changes}
    torch.manual_seed(0)
    dim, hidden, kv = params["dim"], intermediate_of(params), params["n_kv_heads"] * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (16, dim), "norm.weight": (dim,)}
    for layer in range(params["n_layers"]):
        attention, feed = f"layers.{layer}.attention.", f"layers.{layer}.feed_forward."
        shapes |= {f"{attention}wq.weight": (dim, dim), f"{attention}wo.weight": (dim, dim)}
        shapes |= {f"{attention}wk.weight": (kv, dim), f"{attention}wv.weight": (kv, dim)}
        shapes |= {f"{feed}w1.weight": (hidden, dim), f"{feed}w3.weight": (hidden, dim)}
        shapes |= {f"{feed}w2.weight": (dim, hidden)}
        shapes |= {f"layers.{layer}.attention_norm.weight": (dim,), f"layers.{layer}.ffn_norm.weight": (dim,)}
    shapes["output.weight"] = (16, dim)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def cut(name: str, tensor: torch.Tensor, count: int, rank: int, embedding_dim: int) -> torch.Tensor:
    """The part of one tensor that a rank holds; key/value heads repeat when there are more ranks than heads."""
    if name.endswith("norm.weight"):
        return tensor
    if name.endswith(("wk.weight", "wv.weight")) and count > len(tensor) // HEAD_DIM:
        repeat = count // (len(tensor) // HEAD_DIM)
        return tensor[rank // repeat * HEAD_DIM :][:HEAD_DIM].clone()
    dim = 1 if name.endswith(COLUMNS) else embedding_dim if name.startswith("tok_") else 0
    return tensor.chunk(count, dim)[rank].clone()


def save(folder: Path, model: dict[str, torch.Tensor], count: int = 1, embedding_dim: int = 1, **changes: Any) -> Path:
    """Writes `model` as `count` shards."""
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps({**PARAMS, **changes}))
    for rank in range(count):
        shard = {name: cut(name, tensor, count, rank, embedding_dim) for name, tensor in model.items()}
        torch.save(shard, folder / f"consolidated.{rank:02}.pth")
    return folder


def contents(path: Path) -> dict[str, bytes]:
    return {name: tensor.read().tobytes() for name, tensor in open_training(path).items()}


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1]), st.sampled_from([1, 2, 4, 8]))
def test_any_number_of_shards_gives_the_same_tensors(
    tmp_path_factory: pytest.TempPathFactory, count: int, embedding_dim: int, kv_heads: int
) -> None:
    folder = tmp_path_factory.mktemp("split")
    model = whole_model(n_kv_heads=kv_heads)
    one = save(folder / "one", model, n_kv_heads=kv_heads)
    many = save(folder / "many", model, count, embedding_dim, n_kv_heads=kv_heads)
    assert contents(many) == contents(one)


def test_copied_heads_that_params_counts_as_heads_are_found(tmp_path: Path) -> None:
    model = whole_model(n_kv_heads=2)
    one = save(tmp_path / "one", model, n_kv_heads=2)
    many = save(tmp_path / "many", model, 8, n_kv_heads=8)
    assert open_training(many).config["num_key_value_heads"] == 2
    assert contents(many) == contents(one)


def test_copies_that_differ_are_refused_when_they_are_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", whole_model(n_kv_heads=2), 4, n_kv_heads=2)
    shard = torch.load(folder / "consolidated.03.pth")
    shard["layers.1.attention.wv.weight"] += 1
    torch.save(shard, folder / "consolidated.03.pth")
    with pytest.raises(MalformedInput, match="different copies of one key/value head"):
        to_hf(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_the_rope_permutation_of_one_head_of_four(tmp_path: Path) -> None:
    model = whole_model()
    query = open_training(save(tmp_path / "x", model))["model.layers.0.self_attn.q_proj.weight"].read()
    assert np.array_equal(query[:4], model["layers.0.attention.wq.weight"][[0, 2, 1, 3]].numpy())


def test_a_head_that_equals_the_embedding_is_tied(tmp_path: Path) -> None:
    model = whole_model()
    model["output.weight"] = model["tok_embeddings.weight"].clone()
    checkpoint = settled(open_training(save(tmp_path / "x", model, 2)))
    assert "lm_head.weight" not in checkpoint
    assert checkpoint.config["tie_word_embeddings"] is True


@pytest.mark.slow
def test_a_llama_3_2_stretches_its_rope_by_32(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "dim": 2048,
        "n_heads": 512,
        "use_scaled_rope": True,
        "rope_theta": 500000.0,
        "n_layers": 1,
    }
    checkpoint = open_training(save(tmp_path / "x", whole_model(**changes), **changes))
    assert checkpoint.config["rope_scaling"]["factor"] == 32.0


def test_params_nested_under_model_are_found(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", whole_model())
    (folder / "params.json").write_text(json.dumps({"model": PARAMS}))
    assert open_training(folder).config["hidden_size"] == 32


def test_params_can_be_given_and_other_fields_go_to_the_config(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", whole_model())
    params = (folder / "params.json").rename(tmp_path / "params.json")
    with pytest.raises(MalformedInput, match=r"no `params\.json`"):
        open_training(folder)
    (tmp_path / "more.json").write_text('{"max_position_embeddings": 77}')
    assert open_training(folder, config=(params, tmp_path / "more.json")).config["max_position_embeddings"] == 77


def test_norms_that_differ_between_shards_are_a_warning(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", whole_model(), 2)
    shard = torch.load(folder / "consolidated.01.pth")
    shard["norm.weight"] += 1e-3
    torch.save(shard, folder / "consolidated.01.pth")
    assert any("norms differ" in warning for warning in open_training(folder).warnings)


def test_buffers_of_rope_are_dropped(tmp_path: Path) -> None:
    model = whole_model() | {"rope.freqs": torch.ones(2)}
    model["layers.0.attention.inner_attention.rope.freqs"] = torch.ones(2)
    folder = save(tmp_path / "x", model)
    assert contents(folder) == contents(save(tmp_path / "y", whole_model()))


# What is refused


def test_a_gap_in_the_shards_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", whole_model(), 4)
    (folder / "consolidated.02.pth").unlink()
    with pytest.raises(MalformedInput, match=r"`consolidated\.02\.pth` is missing"):
        open_training(folder)


def test_a_missing_last_shard_is_refused(meta: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(meta / "llama2_gqa_mp2_bf16", tmp_path / "x")
    (folder / "consolidated.01.pth").unlink()
    with pytest.raises(MalformedInput, match="has 1 shards .*; expected 2 shards: that of rank 1 is missing"):
        to_hf(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_an_extra_shard_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", whole_model(), 2)
    shutil.copy(folder / "consolidated.01.pth", folder / "consolidated.02.pth")
    with pytest.raises(MalformedInput, match="has 3 shards .*; expected 2 shards"):
        open_training(folder)


def test_a_shard_of_another_split_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", whole_model(), 2)
    other = save(tmp_path / "y", whole_model(), 4)
    shutil.copy(other / "consolidated.01.pth", folder / "consolidated.01.pth")
    with pytest.raises(MalformedInput, match=r"`consolidated\.01\.pth` differs from the first shard"):
        open_training(folder)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", whole_model(), 2)
    data = (folder / "consolidated.01.pth").read_bytes()
    (folder / "consolidated.01.pth").write_bytes(data[:-100])
    with pytest.raises(MalformedInput, match="truncated or damaged"):
        open_training(folder)


WRONG_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "another hidden size": ({"dim": 64}, "expected 2 shards"),
    "another multiplier": ({"ffn_dim_multiplier": 2.0}, "expected 176 rows from `params.json`, got 96"),
    "more layers": ({"n_layers": 3}, "lacks 9 tensors of the model"),
    "odd key heads": ({"n_kv_heads": 3}, "has 4 key/value heads, `params.json` declares 3"),
    "no heads": ({"n_heads": 0}, "no `params.json` with `n_heads`"),
}


@pytest.mark.parametrize(("change", "reason"), WRONG_PARAMS.values(), ids=WRONG_PARAMS.keys())
def test_params_of_another_model_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    folder = save(tmp_path / "x", whole_model(), **change)
    with pytest.raises(MalformedInput, match=reason):
        open_training(folder)


def test_a_tensor_that_no_rule_places_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", whole_model() | {"layers.0.feed_forward.router_DE": torch.ones(2, 2)})
    with pytest.raises(MalformedInput, match=r"no rule places; unexpected keys: `layers\.0\.feed_forward\.router_DE`"):
        open_training(folder)
