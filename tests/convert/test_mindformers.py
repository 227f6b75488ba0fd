"""MindFormers checkpoints: genuine ones give upstream's logits, every family its tensors, a wrong one a refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.convert.configs import read_config_file
from llmconv.convert.to_hf import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem

Save = Callable[..., Path]

CASES: dict[str, dict[str, Any]] = {
    "mf102_gpt2": {},
    "mf102_llama_gqa": {},
    "mf132_bloom": {},
    "mf132_glm2": {},
    "mf132_llama_gqa": {},
    "mf132_llama_qkv_concat": {"qkv_layout": "plain"},
    "mf170_llama_qkv_concat": {"qkv_layout": "interleaved"},
}
CONFIGS = {
    "mf102_gpt2": "gpt2",
    "mf102_llama_gqa": "llama",
    "mf132_bloom": "bloom",
    "mf132_glm2": "glm",
    "mf132_llama_gqa": "llama",
}


def differ(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the largest logit."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_upstream_model(
    mindformers: Path, tmp_path: Path, logits_of: Callable[..., Any], case: str
) -> None:
    folder = mindformers / case
    to_hf(folder / "model.ckpt", tmp_path / "hf", config=[folder / "run.yaml"], **CASES[case])
    with np.load(folder / "reference.npz") as reference:
        assert differ(logits_of(tmp_path / "hf", reference["input_ids"]), reference["logits"]) < 1e-5


@pytest.mark.parametrize(("file", "key"), [("base.ckpt", "logits_base"), ("full_with_lora.ckpt", "logits")])
def test_lora_is_merged_as_upstream_computes(
    mindformers: Path, tmp_path: Path, logits_of: Callable[..., Any], file: str, key: str
) -> None:
    folder = mindformers / "mf132_llama_lora"
    (tmp_path / "lora.json").write_text('{"lora_alpha": 8}')
    to_hf(folder / file, tmp_path / "hf", config=[folder / "run.yaml", tmp_path / "lora.json"])
    with np.load(folder / "reference.npz") as reference:
        assert differ(logits_of(tmp_path / "hf", reference["input_ids"]), reference[key]) < 1e-5


@pytest.mark.parametrize(("case", "model_type"), CONFIGS.items())
def test_the_only_run_configuration_beside_the_file_is_used(mindformers: Path, case: str, model_type: str) -> None:
    config = open_training(mindformers / case / "model.ckpt").config
    assert config["model_type"] == model_type and config["architectures"][0].lower().startswith(model_type)


def test_the_layout_of_fused_matrices_is_asked_for_by_name(mindformers: Path) -> None:
    with pytest.raises(InputRefused, match="fused matrices") as refusal:
        open_training(mindformers / "mf170_llama_qkv_concat" / "model.ckpt")
    assert "--qkv-layout plain" in refusal.value.hint and "--qkv-layout interleaved" in refusal.value.hint


def test_the_option_means_nothing_to_other_formats(composer: Path) -> None:
    with pytest.raises(UsageProblem, match="--qkv-layout"):
        open_training(composer / "weights_only" / "ep0-ba2-rank0.pt", options={"qkv_layout": "plain"})


def test_the_command_takes_yaml_and_the_layout(mindformers: Path, tmp_path: Path) -> None:
    folder = mindformers / "mf170_llama_qkv_concat"
    options = ["--config", folder / "run.yaml", "--qkv-layout", "interleaved", "-o", tmp_path / "hf", "--json"]
    result = CliRunner().invoke(main, ["to-hf", str(folder / "model.ckpt"), *map(str, options)])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["format"] == "mindformers"
    (step,) = json.loads((tmp_path / "hf" / "llmconv.json").read_text())["steps"]
    assert step["options"]["qkv_layout"] == "interleaved"


@pytest.mark.parametrize("name", ["tiny.ckpt", "tiny_crc.ckpt", "tiny.safetensors", "sh", "full"])
def test_every_container_gives_the_same_model(mindspore: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "sizes.json").write_text('{"num_heads": 2, "num_layers": 2}')
    to_hf(mindspore / name, tmp_path / "hf", config=[tmp_path / "sizes.json"])
    found = load_file(tmp_path / "hf" / "model.safetensors")
    with np.load(mindspore / "tiny.npz") as truth:
        assert np.array_equal(found["lm_head.weight"], truth["lm_head.weight"])
        query = truth["model.layers.1.attention.wq.weight"]
    assert np.array_equal(found["model.layers.1.self_attn.q_proj.weight"], query)


def test_lora_without_alpha_asks_for_it(mindformers: Path) -> None:
    with pytest.raises(InputRefused, match="`lora_alpha`"):
        open_training(mindformers / "mf132_llama_lora" / "full_with_lora.ckpt")


def test_lora_alone_is_refused(mindformers: Path) -> None:
    with pytest.raises(InputRefused, match="LoRA parameters only"):
        open_training(mindformers / "mf132_llama_lora" / "trainable_params.ckpt")


def test_an_encrypted_file_is_refused(mindspore: Path) -> None:
    with pytest.raises(UnsupportedInput, match="encrypted"):
        open_training(mindspore / "tiny_cbc.ckpt")


# Models made here: transformers' own, saved under MindFormers' names

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
    checkpoint = opened(tmp_path / "x", save_ckpt, renamed(fused, TO_CORE), **fields)
    assert_equal(checkpoint, weights)
    assert checkpoint.config["model_type"] == model_type


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


def test_the_head_of_baichuan2_is_normalised(tmp_path: Path, save_ckpt: Save) -> None:
    weights = native("llama")
    checkpoint = opened(tmp_path / "x", save_ckpt, renamed(weights, TO_LLAMA), "Baichuan7BV2ForCausalLM")
    head = weights.pop("lm_head.weight").astype(np.float64)
    expected = (head / np.sqrt((head**2).sum(1, keepdims=True) + 1e-5)).astype(np.float32)
    assert np.array_equal(checkpoint["lm_head.weight"].read(), expected)
    assert np.array_equal(checkpoint["model.norm.weight"].read(), weights["model.norm.weight"])


def test_a_shared_head_is_written_once(tmp_path: Path, save_ckpt: Save) -> None:
    weights = native("llama")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    both = opened(tmp_path / "x", save_ckpt, renamed(weights, TO_LLAMA))
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
    "heads that do not divide": ("", {"num_heads": 5}, "do not fit the hidden size"),
    "key heads of another model": ("", {"n_kv_heads": 4}, "do not fit its configuration"),
    "another hidden size": ("", {"hidden_size": 64}, "`hidden_size` 64"),
    "more layers": ("", {"num_layers": 3}, "lacks 9 tensors"),
    "fewer layers": ("", {"num_layers": 1}, "no place in the model"),
    "a number that is none": ("", {"rms_norm_eps": "small"}, "'small'"),
    "a number that is not finite": ("", {"theta": float("inf")}, "'inf'"),
}


@pytest.mark.parametrize(("arch", "fields", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_exact_equal_or_does_not_fit_is_refused(
    tmp_path: Path, save_ckpt: Save, arch: str, fields: Any, reason: str
) -> None:
    with pytest.raises(InputRefused, match=reason) as refusal:
        opened(tmp_path / "x", save_ckpt, renamed(native("llama"), TO_LLAMA), arch, **fields)
    assert refusal.value.hint


def test_chatglm_with_a_switch_that_glm_lacks_is_refused(mindformers: Path, tmp_path: Path) -> None:
    (tmp_path / "more.json").write_text('{"post_self_attn_layernorm": true}')
    run = read_config_file(mindformers / "mf132_glm2" / "run.yaml")
    run["model"]["model_config"]["post_self_attn_layernorm"] = True
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    with pytest.raises(UnsupportedInput, match="post_self_attn_layernorm"):
        open_training(mindformers / "mf132_glm2" / "model.ckpt", config=(tmp_path / "run.yaml",))


def test_a_missing_configuration_is_asked_for(mindformers: Path, tmp_path: Path) -> None:
    shutil.copy(mindformers / "mf102_llama_gqa" / "model.ckpt", tmp_path)
    with pytest.raises(InputRefused, match="no `num_heads`") as refusal:
        open_training(tmp_path / "model.ckpt")
    assert "--config run.yaml" in refusal.value.hint


def test_names_of_no_known_model_are_refused(tmp_path: Path, save_ckpt: Save) -> None:
    with pytest.raises(UnsupportedInput, match="of no known model: it holds `conv1.weight`"):
        open_training(save_ckpt(tmp_path / "x.ckpt", {"conv1.weight": np.zeros((2, 2))}))


def test_a_tensor_that_no_rule_places_is_refused(tmp_path: Path, save_ckpt: Save) -> None:
    weights = renamed(native("llama"), TO_LLAMA) | {"model.layers.0.feed_forward.router.dense.weight": np.zeros((2, 2))}
    with pytest.raises(MalformedInput, match="router"):
        opened(tmp_path / "x", save_ckpt, weights)


def test_one_rank_of_several_is_refused_by_its_shapes(mindspore: Path, tmp_path: Path) -> None:
    shutil.copytree(mindspore / "sh" / "rank_0", tmp_path / "run" / "rank_0")
    (tmp_path / "sizes.json").write_text('{"num_heads": 2, "num_layers": 2}')
    with pytest.raises(MalformedInput, match="do not fit its configuration"):
        open_training(tmp_path / "run", config=(tmp_path / "sizes.json",))


# YAML


BAD_YAML = {
    "an object": ("x: !!python/object/apply:os.system ['true']", "not valid YAML"),
    "a broken one": ("x: [1,", "not valid YAML"),
    "aliases without end": (
        "a: &a [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1 or ''}, *a{i - 1 or ''}]\n" for i in range(1, 40)),
        "expand",
    ),
    "an alias of itself": ("a: &a [*a]", "not valid YAML"),
    "nested without end": ("[" * 100_000, "not valid YAML"),
    "a list": ("[1, 2]", "not a YAML mapping"),
    "far too long": ("a: " + "x" * (1 << 20), "too large"),
}


@pytest.mark.parametrize(("text", "reason"), BAD_YAML.values(), ids=BAD_YAML.keys())
def test_bad_yaml_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(MalformedInput, match=reason):
        read_config_file(tmp_path / "run.yaml")


def test_the_output_is_a_folder_that_opens(mindformers: Path, tmp_path: Path) -> None:
    to_hf(mindformers / "mf102_llama_gqa" / "model.ckpt", tmp_path / "hf")
    assert open_checkpoint(tmp_path / "hf").config["rms_norm_eps"] == 1e-5


def test_inspect_tells_what_is_in_a_file_that_needs_to_be_told_more(mindspore: Path, mindformers: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", "--json", str(mindspore / "sh")])
    found = json.loads(result.stdout)
    assert (found["format"], found["tensors"], found["model_type"]) == ("mindformers", 21, None)
    assert "`num_heads`" in found["warnings"][0] and found["file_bytes"] == 2 * 7769
    whole = CliRunner().invoke(main, ["inspect", "--json", str(mindformers / "mf132_glm2" / "model.ckpt")])
    assert json.loads(whole.stdout)["model_type"] == "glm"


def test_inspect_refuses_what_cannot_be_read(mindspore: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(mindspore / "tiny_cbc.ckpt")])
    assert result.exit_code == 3 and "encrypted" in result.stderr
