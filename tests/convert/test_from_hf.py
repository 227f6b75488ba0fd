"""from-hf: a Hugging Face folder becomes a training checkpoint, and `to-hf` makes the same folder of it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from llmconv.checkpoint import open_checkpoint, read_json
from llmconv.convert import from_hf, to_hf
from llmconv.convert.meta.params import intermediate_of
from tests.convert.accessory_models import FIXTURES
from tests.convert.hf_models import FALCON, LLAMA, MIXTRAL, contents, save_model

MATTERS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"),
    *("num_key_value_heads", "vocab_size", "rope_theta", "rope_scaling", "tie_word_embeddings", "torch_dtype"),
    *("num_local_experts", "num_experts_per_tok", "sliding_window", "bias", "multi_query", "parallel_attn"),
    *("new_decoder_architecture", "alibi", "layer_norm_epsilon"),
)
"""Fields of a config without which another model would come out."""
SWITCHES = ("attention_bias", "mlp_bias")


def there_and_back(folder: Path, config: dict[str, Any], to: str, shards: int) -> dict[str, Any]:
    """Asserts that every tensor and every field that matters comes back; returns the config that came."""
    model = save_model(folder / "model", config)
    from_hf(model, folder / "out", to=to, shards=shards)
    to_hf(folder / "out", folder / "back")
    back = open_checkpoint(folder / "back")
    assert contents(back) == contents(open_checkpoint(model))
    assert {name: back.config.get(name) for name in MATTERS} == {name: config.get(name) for name in MATTERS}
    assert [bool(back.config.get(name)) for name in SWITCHES] == [bool(config.get(name)) for name in SWITCHES]
    return back.config


SIZES = {
    "num_key_value_heads": st.sampled_from([1, 2, 4, 8]),
    "hidden_size": st.sampled_from([16, 32, 48]),
    "intermediate_size": st.sampled_from([8, 40, 56, 344]),
    "num_hidden_layers": st.integers(1, 3),
    "vocab_size": st.sampled_from([8, 24, 64]),
    "tie_word_embeddings": st.booleans(),
    "torch_dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
    "rope_theta": st.sampled_from([10000.0, 500000.0, 1e6]),
    "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
}
LLAMAS = st.fixed_dictionaries(SIZES).map(lambda changes: LLAMA | changes)


@settings(max_examples=25, deadline=None)
@given(config=LLAMAS, shards=st.sampled_from([1, 2, 4, 8]))
def test_meta_and_back_is_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], shards: int
) -> None:
    folder = tmp_path_factory.mktemp("meta")
    there_and_back(folder, config, "meta", shards)
    assert len(list((folder / "out").glob("consolidated.*.pth"))) == shards


BIASED = st.fixed_dictionaries(
    {
        **SIZES,
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "num_key_value_heads": st.sampled_from([4, 8]),
    }
)
EXPERTS = {**SIZES, "num_key_value_heads": st.sampled_from([4, 8]), "num_local_experts": st.sampled_from([4, 8])}
FALCON_KINDS = st.fixed_dictionaries({name: st.booleans() for name in ("multi_query", "parallel_attn", "bias")})


@settings(max_examples=40, deadline=None)
@given(
    config=st.one_of(
        BIASED.map(lambda changes: LLAMA | changes),
        st.fixed_dictionaries(EXPERTS).map(lambda changes: MIXTRAL | changes),
        FALCON_KINDS.map(lambda changes: FALCON | changes),
    ),
    shards=st.sampled_from([1, 2, 4]),
)
def test_accessory_and_back_is_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], shards: int
) -> None:
    folder = tmp_path_factory.mktemp("accessory")
    back = there_and_back(folder, config, "accessory", shards)
    assert back["max_position_embeddings"] == config["max_position_embeddings"]


# Genuine checkpoints come out of the Hugging Face folder as they went in, shard by shard

GENUINE = ("llama2_gqa_mp2_bf16", "llama3_1_scaled_mp2_bf16", "llama3_gqa_mp1_bf16")


def shards_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of every shard as torch reads them, buffers left out."""
    files = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("consolidated.*.pth"))}
    states = {name: content.get("model", content) for name, content in files.items()}
    return {
        name: {key: tensor for key, tensor in state.items() if "rope.freqs" not in key}
        for name, state in states.items()
    }


def assert_same_shards(one: Path, other: Path) -> None:
    left, right = shards_of(one), shards_of(other)
    assert {name: set(state) for name, state in left.items()} == {name: set(state) for name, state in right.items()}
    for name, state in left.items():
        for key, tensor in state.items():
            assert tensor.dtype == right[name][key].dtype and torch.equal(tensor, right[name][key]), (name, key)


@pytest.mark.parametrize("case", GENUINE)
def test_a_genuine_meta_checkpoint_comes_back_shard_by_shard(meta: Path, tmp_path: Path, case: str) -> None:
    source = meta / case
    to_hf(source, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "out", to="meta", shards=len(list(source.glob("*.pth"))))
    assert_same_shards(source, tmp_path / "out")
    old, new = (read_json(folder / "params.json") for folder in (source, tmp_path / "out"))
    assert intermediate_of(new) == intermediate_of(old)
    assert {name: new[name] for name in ("dim", "n_layers", "n_heads", "norm_eps")} == {
        name: old[name] for name in ("dim", "n_layers", "n_heads", "norm_eps")
    }
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()


ACCESSORY = ("llama_mp2_bf16", "mixtral_mp2_bf16", "falcon7b_mp2_bf16")


@pytest.mark.parametrize("case", ACCESSORY)
def test_a_genuine_accessory_checkpoint_comes_back_shard_by_shard(tmp_path: Path, case: str) -> None:
    source = FIXTURES / case
    to_hf(source, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "out", to="accessory", shards=2)
    assert_same_shards(source, tmp_path / "out")
    assert read_json(tmp_path / "out" / "meta.json") == read_json(source / "meta.json")
    old, new = (read_json(folder / "config.json") for folder in (source, tmp_path / "out"))
    assert set(new) - set(old) <= {"n_kv_heads"}
    differ = {name for name in old if old[name] != new.get(name)}
    assert differ <= {"multiple_of", "ffn_dim_multiplier", "num_kv_heads", "n_kv_heads", "load_balancing_weight"}
