"""MindFormers' families: transformers' own tiny models, saved under MindFormers' names, give back their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from llmconv.checkpoint import Checkpoint
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput

Save = Callable[..., Path]

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RUN = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "n_kv_heads": 2, "vocab_size": 48}

TO_LLAMA = {
    "model.embed_tokens.weight": "model.tok_embeddings.embedding_weight",
    ".self_attn.q_proj.": ".attention.wq.",
    ".self_attn.k_proj.": ".attention.wk.",
    ".self_attn.v_proj.": ".attention.wv.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    "model.norm.": "model.norm_out.",
}
TO_QWEN = TO_LLAMA | {
    "model.embed_tokens.weight": "transformer.wte.embedding_weight",
    ".mlp.gate_proj.": ".feed_forward.w3.",
    ".mlp.up_proj.": ".feed_forward.w1.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.layers.",
}
TO_CORE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    ".self_attn.o_proj.": ".self_attention.linear_proj.",
    ".self_attn.q_norm.": ".self_attention.q_layernorm.",
    ".self_attn.k_norm.": ".self_attention.k_layernorm.",
    ".self_attn.": ".self_attention.",
    ".mlp.down_proj.": ".mlp.linear_fc2.",
    ".post_attention_layernorm.": ".pre_mlp_layernorm.",
    "model.norm.": "decoder.final_layernorm.",
    "model.layers.": "decoder.layers.",
    "lm_head.": "output_layer.",
}

Weights = dict[str, Any]


def native(model_type: str, **changes: Any) -> Weights:
    """The seeded weights of a tiny model of transformers, every one random."""
    config = AutoConfig.for_model(model_type, **(SIZES | changes))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return {name: torch.randn(tensor.shape).numpy() for name, tensor in model.state_dict().items()}


def renamed(weights: Weights, table: Mapping[str, str]) -> Weights:
    result = {}
    for name, tensor in weights.items():
        for ours, theirs in table.items():
            name = name.replace(ours, theirs)
        result[name] = tensor
    return result


def grouped(parts: list[Any], groups: int) -> Any:
    """Parts fused as since 1.5: the rows of each group of all parts together."""
    split = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(split, axis=1).reshape(-1, *parts[0].shape[1:])


def fuse(weights: Weights, parts: list[str], fused: str, groups: int) -> Weights:
    """`weights` with the tensors whose names differ in `parts` fused under names with `fused` in that place."""
    kept = {name: tensor for name, tensor in weights.items() if not any(part in name for part in parts)}
    for name in [name for name in weights if parts[0] in name]:
        kept[name.replace(parts[0], fused)] = grouped([weights[name.replace(parts[0], part)] for part in parts], groups)
    return kept


def opened(path: Path, save: Save, weights: Weights, arch: str = "", **fields: Any) -> Checkpoint:
    """The checkpoint of `weights` saved with a run configuration beside it."""
    path.mkdir()
    run = {"model": {"model_config": {**RUN, **fields}, "arch": {"type": arch}}, "trainer": {"type": "x"}}
    (path / "run.yaml").write_text(yaml.safe_dump(run))
    return open_training(save(path / "model.ckpt", weights))


def assert_equal(checkpoint: Checkpoint, weights: Weights) -> None:
    assert set(checkpoint) == set(weights)
    for name, tensor in weights.items():
        assert np.array_equal(checkpoint[name].read(), tensor), name


MADE: dict[str, tuple[str, dict[str, Any], dict[str, str], str]] = {
    "llama": ("llama", {}, TO_LLAMA, "LlamaForCausalLM"),
    "internlm": ("llama", {"attention_bias": True}, TO_LLAMA, "InternLMForCausalLM"),
    "qwen 1.5 and 2": ("qwen2", {}, TO_LLAMA, "LlamaForCausalLM"),
    "qwen 1": ("qwen2", {}, TO_QWEN, "QwenForCausalLM"),
    "internlm2 with separate matrices": ("llama", {}, TO_LLAMA, "InternLM2ForCausalLM"),
    "baichuan 1": ("llama", {}, TO_LLAMA, "Baichuan7BForCausalLM"),
}


@pytest.mark.parametrize(("kind", "changes", "table", "arch"), MADE.values(), ids=MADE.keys())
def test_each_kind_gives_back_its_weights(
    tmp_path: Path, save_ckpt: Save, kind: str, changes: Any, table: Any, arch: str
) -> None:
    weights = native(kind, **changes)
    checkpoint = opened(tmp_path / "x", save_ckpt, renamed(weights, table), arch)
    assert_equal(checkpoint, weights)
    assert checkpoint.config["model_type"] == kind
    assert checkpoint.config.get("attention_bias", False) == changes.get("attention_bias", False)


@pytest.mark.parametrize(
    ("model_type", "fields"), [("qwen3", {"head_dim": 16, "num_query_groups": 2}), ("qwen2", {"num_query_groups": 2})]
)
def test_megatron_names_are_taken_apart(tmp_path: Path, save_ckpt: Save, model_type: str, fields: Any) -> None:
    weights = native(model_type, head_dim=fields.get("head_dim", 8))
    fused = fuse(weights, ["q_proj", "k_proj", "v_proj"], "linear_qkv", 2)
    fused = fuse(fused, ["gate_proj", "up_proj"], "linear_fc1", 40)
    said: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    checkpoint = opened(tmp_path / "x", save_ckpt, renamed(fused, TO_CORE), **fields, **said)
    assert_equal(checkpoint, weights)
    assert (checkpoint.config["model_type"], checkpoint.config["rope_theta"]) == (model_type, 1e6)


def test_megatron_names_need_the_config_json_of_the_run(tmp_path: Path, save_ckpt: Save) -> None:
    fused = fuse(native("qwen2", head_dim=8), ["q_proj", "k_proj", "v_proj"], "linear_qkv", 2)
    weights = renamed(fuse(fused, ["gate_proj", "up_proj"], "linear_fc1", 40), TO_CORE)
    with pytest.raises(InputRefused, match="no `rms_norm_eps`") as refusal:
        opened(tmp_path / "x", save_ckpt, weights)
    assert "pretrained_model_dir" in refusal.value.hint
    (tmp_path / "config.json").write_text('{"rms_norm_eps": 1e-6, "rope_theta": 1e6}')
    path, files = tmp_path / "x" / "model.ckpt", (tmp_path / "config.json", tmp_path / "x" / "run.yaml")
    assert open_training(path, config=files).config["rms_norm_eps"] == 1e-6


def test_internlm2_keeps_its_own_order(tmp_path: Path, save_ckpt: Save) -> None:
    weights = native("llama")
    fused = fuse(renamed(weights, TO_LLAMA), [".wq.", ".wk.", ".wv."], ".w.", 2)
    assert_equal(opened(tmp_path / "x", save_ckpt, fused, "InternLM2ForCausalLM"), weights)


def test_the_fused_matrix_of_release_1_0_is_plain(tmp_path: Path, save_ckpt: Save) -> None:
    weights = native("llama")
    fused = fuse(renamed(weights, TO_LLAMA), [".wq.", ".wk.", ".wv."], ".w.", 1)
    assert_equal(opened(tmp_path / "x", save_ckpt, fused, "LlamaForCausalLM"), weights)


@pytest.mark.parametrize("rearranged", [False, True])
def test_chatglm_of_1_5_and_later_gives_back_its_weights(tmp_path: Path, save_ckpt: Save, rearranged: bool) -> None:
    weights = native("glm", head_dim=8, attention_bias=True, pad_token_id=0)
    stored: Weights = {}
    for name, tensor in weights.items():
        if rearranged and (".q_proj." in name or ".k_proj." in name):
            heads = tensor.reshape(-1, 8, *tensor.shape[1:])
            tensor = np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(tensor.shape)
        if "gate_up_proj" in name:
            left, right = np.split(tensor, 2)
            stored |= {name.replace("gate_up_proj", "dense_left"): left}
            stored |= {name.replace("gate_up_proj", "dense_right"): right}
        else:
            stored[name] = tensor
    table = {
        "model.embed_tokens.weight": "transformer.embedding.embedding_weight",
        "model.norm.": "transformer.encoder.final_layernorm.",
        "lm_head.": "transformer.output_layer.",
        "model.layers.": "transformer.encoder.layers.",
        "self_attn.o_proj": "self_attention.dense",
        "down_proj": "dense_4h_to_h",
        **{f"self_attn.{one}_proj": f"self_attention.w{one}" for one in "qkv"},
    }
    fields: dict[str, Any] = {"kv_channels": 8, "num_attention_heads": 4, "multi_query_group_num": 2}
    checkpoint = opened(
        tmp_path / "x", save_ckpt, renamed(stored, table), **fields, use_rearrange_rope=rearranged, rope_ratio=50
    )
    assert_equal(checkpoint, weights)
    assert (checkpoint.config["rope_theta"], checkpoint.config["model_type"]) == (500000.0, "glm")


def test_the_head_of_baichuan2_is_normalized(tmp_path: Path, save_ckpt: Save) -> None:
    weights = native("llama")
    checkpoint = opened(tmp_path / "x", save_ckpt, renamed(weights, TO_LLAMA), "Baichuan7BV2ForCausalLM")
    head = weights.pop("lm_head.weight").astype(np.float64)
    expected = (head / np.sqrt((head**2).sum(1, keepdims=True) + 1e-5)).astype(np.float32)
    assert np.array_equal(checkpoint["lm_head.weight"].read(), expected)
    assert np.array_equal(checkpoint["model.norm.weight"].read(), weights["model.norm.weight"])


def test_a_shared_head_is_written_once(tmp_path: Path, save_ckpt: Save) -> None:
    weights = native("llama")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    both = settled(opened(tmp_path / "x", save_ckpt, renamed(weights, TO_LLAMA)))
    del weights["lm_head.weight"]
    one = opened(tmp_path / "y", save_ckpt, renamed(weights, TO_LLAMA), tie_word_embeddings=True)
    assert both.config["tie_word_embeddings"] is one.config["tie_word_embeddings"] is True
    assert set(both) == set(one) == set(weights)


YARN = {
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32768,
}

ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"theta": 1e6, "extend_method": "None"}, {"rope_theta": 1e6}),
    "yaml 1.1 reads 5e5 as text": ({"theta": "5e5"}, {"rope_theta": 5e5}),
    "ntk": ({"extend_method": "NTK", "scaling_factor": 4}, {"rope_theta": 40000.0}),
    "pi": (
        {"extend_method": "PI", "scaling_factor": 2.0},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "yarn": (
        {"extend_method": "YARN", "scaling_factor": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0}},
        {
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.138629436111989},
        },
    ),
    "llama 3": (
        {
            "theta": 5e5,
            "extend_method": "LLAMA3",
            "scaling_factor": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
}


@pytest.mark.parametrize(("fields", "expected"), ROPES.values(), ids=ROPES.keys())
def test_rotary_settings_are_carried_over(tmp_path: Path, save_ckpt: Save, fields: Any, expected: Any) -> None:
    config = opened(tmp_path / "x", save_ckpt, renamed(native("llama"), TO_LLAMA), **fields).config
    assert {name: config[name] for name in config if name.startswith("rope")} == expected


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "baichuan 13b": ("Baichuan13BV2ForCausalLM", {}, "ALiBi"),
    "alibi": ("LlamaForCausalLM", {"use_alibi": True}, "ALiBi"),
    "another rotary method": (
        "LlamaForCausalLM",
        {"extend_method": "DYNAMIC_NTK", "scaling_factor": 2.0},
        "rotary formula",
    ),
    "another activation": ("LlamaForCausalLM", {"hidden_act": "gelu"}, "SwiGLU"),
    "heads that do not divide": ("", {"num_heads": 5}, "do not match the hidden size"),
    "key heads of another model": ("", {"n_kv_heads": 4}, "another shape than its configuration"),
    "another hidden size": ("", {"hidden_size": 64}, "`hidden_size` 64"),
    "more layers": ("", {"num_layers": 3}, "has 2 layers, its configuration says 3"),
    "fewer layers": ("", {"num_layers": 1}, "has 2 layers, its configuration says 1"),
    "a number that is none": ("", {"rms_norm_eps": "small"}, "'small'"),
    "a number that is not finite": ("", {"theta": float("inf")}, "is invalid: inf"),
}


@pytest.mark.parametrize(("arch", "fields", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_models_without_an_exact_equivalent_are_refused(
    tmp_path: Path, save_ckpt: Save, arch: str, fields: Any, reason: str
) -> None:
    with pytest.raises(InputRefused, match=reason) as refusal:
        opened(tmp_path / "x", save_ckpt, renamed(native("llama"), TO_LLAMA), arch, **fields)
    assert refusal.value.hint


def test_a_tensor_that_no_rule_places_is_refused(tmp_path: Path, save_ckpt: Save) -> None:
    weights = renamed(native("llama"), TO_LLAMA) | {"model.layers.0.feed_forward.router.dense.weight": np.zeros((2, 2))}
    with pytest.raises(MalformedInput, match="router"):
        opened(tmp_path / "x", save_ckpt, weights)
