"""Families in GGUF files: what is written comes back, and what a file or transformers cannot state is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file

from llmconv.checkpoint import open_checkpoint, read_json
from llmconv.convert import from_hf, to_hf
from llmconv.convert.formats.gguf.configs import Keys
from llmconv.convert.formats.gguf.names import in_hugging_face_names
from llmconv.convert.opening import open_training
from llmconv.errors import UnsupportedInput
from llmconv.files.gguf_file import read_gguf
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from tests.builders.gguf_files import write_gguf
from tests.conftest import DECODER, save_tiny

FALCON = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "bias": False}

LATENT: dict[str, Any] = {
    **DECODER,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}

ALTERNATING: dict[str, Any] = {
    **DECODER,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, untied, without grouped heads": ("llama", {"num_key_value_heads": 4, "rope_theta": 5e5}),
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": (
        "granite",
        {
            **DECODER,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078125,
            "logits_scaling": 8.0,
        },
    ),
    "smollm3": ("smollm3", {**DECODER, "pad_token_id": 0, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "gemma": ("gemma", {**DECODER, "head_dim": 16}),
    "gemma2": ("gemma2", {}),
    "gemma3": (
        "gemma3_text",
        {**DECODER, "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    ),
    "phi3": ("phi3", {**DECODER, "pad_token_id": 0, "original_max_position_embeddings": 128}),
    "phi3 with longrope": (
        "phi3",
        {
            **DECODER,
            "pad_token_id": 0,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1 + number / 8 for number in range(8)],
                "long_factor": [2 + number / 2 for number in range(8)],
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "starcoder2": ("starcoder2", {**DECODER, "sliding_window": None}),
    "gpt2": ("gpt2", {}),
    "bloom": ("bloom", {}),
    "falcon": ("falcon", {**FALCON, "ffn_hidden_size": 256, "new_decoder_architecture": False, "multi_query": True}),
    "falcon with groups": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "mpt": ("mpt", {"vocab_size": 96, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    "ernie4_5": ("ernie4_5", {**DECODER, "head_dim": 16}),
    "olmo2": ("olmo2", DECODER),
    "command-r": ("cohere", DECODER),
    "command-r plus": ("cohere", {**DECODER, "num_hidden_layers": 64, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**DECODER, "sliding_window": 8}),
    "glm4": ("glm4", {**DECODER, "head_dim": 16}),
    "hunyuan": ("hunyuan_v1_dense", {**DECODER, "head_dim": 16}),
    "stablelm": ("stablelm", DECODER),
    "stablelm with biases": ("stablelm", {**DECODER, "use_parallel_residual": True, "use_qkv_bias": True}),
    "exaone4": (
        "exaone4",
        {**DECODER, "head_dim": 16, "sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "exaone4 with windows": ("exaone4", {**DECODER, "num_hidden_layers": 64, "head_dim": 16, "sliding_window": 8}),
    "lfm2": ("lfm2", {**DECODER, "full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": False}),
    "gpt-oss": ("gpt_oss", ALTERNATING),
    "deepseek v3": ("deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "deepseek v3, not normalized": ("deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek v2": ("deepseek_v2", LATENT),
    "deepseek v2 lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
}


def save_family(name: str, folder: Path) -> Path:
    """A tiny model of `FAMILIES`; the biases of experts, which transformers initializes to zero, are random too."""
    kind, changes = FAMILIES[name]
    model = save_tiny(kind, folder, **changes)
    if kind == "deepseek_v3":
        tensors, random = load_file(model / "model.safetensors"), np.random.default_rng(0)
        for one in [one for one in tensors if one.endswith("e_score_correction_bias")]:
            tensors[one] = random.normal(size=tensors[one].shape).astype(np.float32)
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.quick_rows("llama", "qwen3_moe", "gemma2", "gpt2", "falcon with groups", "phi3 with longrope")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_comes_back(tmp_path: Path, logits_of: Callable[..., Any], name: str) -> None:
    kind, model = FAMILIES[name][0], save_family(name, tmp_path / "model")
    file = write_gguf(model, tmp_path / "x.gguf")
    to_hf(file, tmp_path / "hf")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "hf"))
    assert before.keys() == after.keys()
    if not kind.startswith("gemma"):  # whose norms are stored plus one
        assert all(np.array_equal(before[one], after[one]) for one in before)
    ids = np.arange(3, 33)[None]
    assert np.array_equal(logits_of(model, ids), logits_of(tmp_path / "hf", ids))


def test_experts_of_gpt_oss_have_the_values_of_their_blocks(tmp_path: Path) -> None:
    model = save_family("gpt-oss", tmp_path / "model")
    file = write_gguf(model, tmp_path / "x.gguf", quantized=GGMLQuantizationType.MXFP4)
    opened, stored = open_training(file), {one.name: one for one in GGUFReader(file).tensors}
    gate, up, down = (
        dequantize(stored[f"blk.1.ffn_{part}_exps.weight"].data, GGMLQuantizationType.MXFP4).swapaxes(1, 2)
        for part in ("gate", "up", "down")
    )
    found = opened["model.layers.1.mlp.experts.gate_up_proj"].read()
    assert np.array_equal(found[:, :, ::2], gate) and np.array_equal(found[:, :, 1::2], up)
    assert np.array_equal(opened["model.layers.1.mlp.experts.down_proj"].read(), down)
    weights = load_file(model / "model.safetensors")
    for name in ("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias", "self_attn.sinks", "mlp.router.bias"):
        assert np.array_equal(opened[f"model.layers.1.{name}"].read(), weights[f"model.layers.1.{name}"])


@pytest.mark.quick_rows("deepseek v3, not normalized")
@pytest.mark.parametrize("name", ["deepseek v3, not normalized", "deepseek v2", "deepseek v2 lite"])
def test_older_files_of_deepseek_have_keys_and_values_in_one(tmp_path: Path, name: str) -> None:
    model = save_family(name, tmp_path / "model")
    to_hf(write_gguf(model, tmp_path / "x.gguf", older=True), tmp_path / "hf")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "hf"))
    assert before.keys() == after.keys() and all(np.array_equal(before[one], after[one]) for one in before)
    assert read_json(tmp_path / "hf/config.json")["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("gpt-oss", {"attention.sliding_window_pattern": 4}, "a sliding window in other layers"),
        ("olmo2", {"attention.sliding_window": 8}, "`attention.sliding_window` = 8"),
        ("cohere2", {"attention.sliding_window_pattern": 2}, "a sliding window in other layers"),
        ("exaone4", {"block_count": 64}, "no sliding window in 64 layers"),
        ("exaone4 with windows", {"attention.sliding_window_pattern": 2}, "a sliding window in other layers"),
        ("exaone4 with windows", {"rope.freq_base_swa": 7.0}, "turns positions by another base"),
        ("command-r", {"block_count": 64}, "no norms of queries in 64 layers"),
        ("stablelm", {"attention.key_length": 8, "attention.value_length": 8}, "heads that do not divide its width"),
        ("gpt-oss", {"expert_weights_scale": 2}, "`expert_weights_scale` = 2"),
        ("deepseek v2", {"expert_gating_func": 2}, "chooses experts in another way"),
        ("deepseek v2", {"expert_group_count": 4, "expert_group_used_count": 2}, "has groups of experts"),
        ("deepseek v2", {"expert_weights_norm": True}, "normalizes the weights of its experts"),
        ("deepseek v2", {"attention.key_length": 20}, "other sizes than its latents"),
        ("deepseek v2", {"expert_count": 0}, "has no experts"),
        ("deepseek v3", {"expert_count": 256, "expert_group_count": 0}, "the groups of the 256 experts of DeepSeek-V3"),
        ("deepseek v3", {"nextn_predict_layers": 1}, "`nextn_predict_layers` = 1"),
        ("deepseek v3", {"rope.scaling.type": "linear", "rope.scaling.factor": 2}, "positions by `linear`"),
        (
            "deepseek v3",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4, "rope.scaling.original_context_length": 32},
            "YaRN without the scale of its attention",
        ),
    ],
)
def test_files_that_transformers_cannot_compute_are_refused(
    tmp_path: Path, name: str, more: dict[str, Any], said: str
) -> None:
    file = write_gguf(save_family(name, tmp_path / "model"), tmp_path / "x.gguf")
    architecture = str(GGUFReader(file).fields["general.architecture"].contents())
    with pytest.raises(UnsupportedInput, match=re.escape(said)):
        in_hugging_face_names(
            Keys.of(read_gguf(file).metadata | {f"{architecture}.{key}": value for key, value in more.items()}, "x"),
            {name: one.values for name, one in read_gguf(file).tensors.items()},
        )


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt-oss": {"experts_per_token": 2, "initial_context_length": 4096, "output_router_logits": False},
    "deepseek v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1},
    "deepseek v2": {"moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy", "seq_aux": True},
    "cohere2": {"rotary_pct": 1.0, "position_embedding_type": "rope_gptj", "sliding_window_pattern": 4},
    "lfm2": {"block_dim": 64, "block_norm_eps": 1e-5, "conv_dim": 64, "num_heads": 4, "use_pos_enc": True},
}
"""Fields of published models that transformers' classes do not read."""


@pytest.mark.quick_rows("deepseek v3")
@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_that_change_nothing_are_no_obstacle(tmp_path: Path, name: str) -> None:
    model = save_family(name, tmp_path / "model")
    config = read_json(model / "config.json")
    (model / "config.json").write_text(json.dumps({**config, **PUBLISHED[name]}))
    from_hf(model, tmp_path / "out", to="gguf")
    assert (tmp_path / "out/model.gguf").exists()


def test_sizes_of_lfm2_are_those_that_it_computes(tmp_path: Path, logits_of: Callable[..., Any]) -> None:
    sizes = {"block_auto_adjust_ff_dim": True, "block_multiple_of": 48, "block_ffn_dim_multiplier": 1.3}
    model = save_tiny("lfm2", tmp_path / "model", **DECODER, **sizes, full_attn_idxs=[1])
    from_hf(model, tmp_path / "out", to="gguf")
    assert GGUFReader(tmp_path / "out/model.gguf").fields["lfm2.feed_forward_length"].contents() == 96
    to_hf(tmp_path / "out", tmp_path / "back")
    ids = np.arange(3, 33)[None]
    assert np.array_equal(logits_of(model, ids), logits_of(tmp_path / "back", ids))


WRITTEN = [name for name in FAMILIES if name != "llama, untied, without grouped heads"]


@pytest.mark.quick_rows(
    *(
        "llama",
        "mixtral",
        "gemma3",
        "gpt2",
        "falcon with groups",
        "gpt-oss",
        "deepseek v3",
        "lfm2",
        "phi3 with longrope",
    )
)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_file_has_the_tensors_of_the_converter_and_comes_back(tmp_path: Path, name: str) -> None:
    kind, model = FAMILIES[name][0], save_family(name, tmp_path / "model")
    from_hf(model, tmp_path / "out", to="gguf")
    ours, theirs = (
        {one.name: one for one in GGUFReader(file).tensors}
        for file in (tmp_path / "out/model.gguf", write_gguf(model, tmp_path / "x.gguf"))
    )
    assert ours.keys() == theirs.keys()
    for one in ours:
        assert ours[one].tensor_type == theirs[one].tensor_type and np.array_equal(ours[one].data, theirs[one].data)
    keys, wanted = (
        {key: field.contents() for key, field in GGUFReader(file).fields.items() if not key.startswith("GGUF.")}
        for file in (tmp_path / "out/model.gguf", tmp_path / "x.gguf")
    )
    assert {key: keys.get(key) for key in wanted} == wanted
    to_hf(tmp_path / "out", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert kind.startswith("gemma") or all(np.array_equal(before[one], after[one]) for one in before)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_positions_come_back(tmp_path: Path, logits_of: Callable[..., Any], rope: dict[str, Any]) -> None:
    model = save_tiny("llama", tmp_path / "model", rope_parameters={**rope, "rope_theta": 500000.0})
    from_hf(model, tmp_path / "out", to="gguf")
    to_hf(tmp_path / "out", tmp_path / "back")
    ids = np.arange(3, 63)[None]
    assert np.array_equal(logits_of(model, ids), logits_of(tmp_path / "back", ids))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("mistral", {"sliding_window": 16}, "a sliding window"),
        ("mistral", {"sliding_window": 4096}, "a sliding window"),
        ("starcoder2", {**DECODER, "sliding_window": 4}, "does not state: `sliding_window` 4"),
        (
            "gemma3_text",
            {**FAMILIES["gemma3"][1], "use_bidirectional_attention": True},
            "`use_bidirectional_attention`",
        ),
        ("gpt2", {"scale_attn_weights": False}, "does not state: `scale_attn_weights` False"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "`apply_residual_connection_post_layernorm` True",
        ),
        ("llama", {"hidden_act": "gelu"}, "does not state: `hidden_act` gelu"),
        ("llama", {"is_causal": False}, "does not state: `is_causal` False"),
        ("qwen3_moe", {"norm_topk_prob": False}, "does not state: `norm_topk_prob` False"),
        ("gemma2", {"query_pre_attn_scalar": 8}, "does not state: `query_pre_attn_scalar` 8"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "does not state"),
        ("gpt_oss", {**ALTERNATING, "swiglu_limit": 6.0}, "does not state: `swiglu_limit` 6.0"),
        ("gpt_oss", {**ALTERNATING, "layer_types": ["full_attention"] * 4}, "does not state: `layer_types`"),
        ("gpt_oss", {**ALTERNATING, "attention_bias": False}, "does not state: `attention_bias` False"),
        ("gpt_oss", {**ALTERNATING, "tie_word_embeddings": True}, "a tied head"),
        ("exaone4", {**DECODER, "sliding_window": 8}, "a sliding window in 4 layers"),
        ("lfm2", {**DECODER, "full_attn_idxs": [1], "conv_bias": True}, "does not state: `conv_bias` True"),
        ("lfm2", {**DECODER, "full_attn_idxs": []}, "cannot state the model `model`: `attention.head_count_kv`"),
        ("cohere", {**DECODER, "tie_word_embeddings": False}, "its own head"),
        ("gemma", {**DECODER, "head_dim": 16, "tie_word_embeddings": False}, "its own head"),
        ("gemma2", {"tie_word_embeddings": False}, "its own head"),
        ("cohere", {**DECODER, "use_qk_norm": True}, "norms of queries in 4 layers"),
        ("cohere", {**DECODER, "attention_bias": True}, "does not state: `attention_bias` True"),
        ("cohere2", {**DECODER, "layer_types": ["full_attention"] * 4}, "does not state: `layer_types`"),
        ("cohere2", {**DECODER, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "scales rotary positions"),
        ("glm4", {**DECODER, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "scales rotary positions"),
        ("deepseek_v2", {**LATENT, "norm_topk_prob": True}, "normalizes the weights of its experts"),
        (
            "deepseek_v2",
            {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "has groups of experts",
        ),
        (
            "deepseek_v2",
            {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
            "does not state",
        ),
        ("deepseek_v3", {**LATENT, "rope_interleave": False, "n_group": 1, "topk_group": 1}, "`rope_interleave` False"),
        ("gpt_neox", {**DECODER, "hidden_act": "gelu"}, "a model of the type `gpt_neox` is not written as GGUF"),
    ],
)
def test_what_a_file_cannot_say_is_refused(tmp_path: Path, kind: str, changes: dict[str, Any], said: str) -> None:
    model = save_tiny(kind, tmp_path / "model", **changes)
    with pytest.raises(UnsupportedInput, match=re.escape(said)):
        from_hf(model, tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()


def test_codes_of_turned_experts_are_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(
        save_family("gpt-oss", tmp_path / "model"), tmp_path / "x.gguf", quantized=GGMLQuantizationType.MXFP4
    )
    plain = open_training(file)
    to_hf(file, tmp_path / "hf", quant="keep")
    assert "12 tensors are dequantized, since the model has their rows as columns" in capsys.readouterr().err
    kept = quantized_checkpoint(open_checkpoint(tmp_path / "hf"))
    assert kept and len(kept.weights) == 4 * 5 + 1  # queries, keys, values, output and router of a layer, and the head
    assert all(np.array_equal(plain[name].read(), kept.plain[name].read()) for name in plain)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gpt-oss", {"rope_parameters": {**YARN, "truncate": False}}, "rounds the range of YaRN"),
        ("deepseek v3", {"rms_norm_eps": 1e-5}, "for the norms of latents too"),
        ("phi3 with longrope", {}, "if its context is larger than 256 tokens"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, changes: dict[str, Any], said: str
) -> None:
    kind, fields = FAMILIES[name]
    from_hf(save_tiny(kind, tmp_path / "model", **{**fields, **changes}), tmp_path / "out", to="gguf")
    assert said in capsys.readouterr().err
