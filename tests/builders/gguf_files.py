"""GGUF files of tiny models, written by the package `gguf`: its names and keys, and what llama.cpp's converter changes.

What the converter does to a family (rows in another order, norms plus one, matrices turned) is written here in the
direction of the converter, on whole arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
)
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from safetensors.numpy import load_file

Values = np.ndarray[Any, np.dtype[Any]]

ARCHITECTURE = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
}
"""llama.cpp's name of a model type, where it differs."""

WINDOWS = ("gemma2", "gemma3_text", "phi3", "gpt_oss", "cohere2", "exaone4")


def write_gguf(
    folder: Path,
    output: Path,
    *,
    quantized: GGMLQuantizationType | None = None,
    tokenizer: Callable[[GGUFWriter], None] | None = None,
    more: Mapping[str, Any] | None = None,
    older: bool = False,
) -> Path:
    """The model of a Hugging Face folder with one safetensors file as GGUF; matrices `quantized`, if given.

    `tokenizer` adds a vocabulary, `more` other texts and numbers. `older`: keys and values of DeepSeek are one tensor.
    """
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    writer = GGUFWriter(output, ARCHITECTURE.get(kind, kind))
    _add_sizes(writer, config)
    if "kv_lora_rank" in config:
        _add_latent(writer, config, older=older)
    (tokenizer or (lambda writer: writer.add_tokenizer_model("no_vocab")))(writer)
    for key, value in (more or {}).items():
        add: Callable[[str, Any], None] = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)
    tensors = _divided(load_file(folder / "model.safetensors"), config, older=older)
    for name, values in _renamed(tensors, config, writer.arch).items():
        if quantized is not None and values.ndim > 1 and name.endswith(".weight"):
            writer.add_tensor(name, blocks(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    rope = config.get("rope_parameters") or {}
    for length in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output


SCALE_AT = {
    "Q2_K": 80,
    "Q3_K": 108,
    "Q6_K": 208,
    "TQ1_0": 52,
    "TQ2_0": 64,
}  # bytes before the scale in a block, where there are some
LEAST_AT = {"Q2_K": 82, "Q4_K": 2, "Q5_K": 2}  # bytes before the scale of the minima


def blocks(values: Values, kind: GGMLQuantizationType) -> Values:
    """The values quantized, or, of types that the package cannot make, any codes with a small scale."""
    try:
        made: Values = quantize(values.astype(np.float32), kind)
        return made
    except NotImplementedError:
        elements, width = GGML_QUANT_SIZES[kind]
        count = values.size // elements
        made = np.random.default_rng(int(np.abs(values).sum() * 1000)).integers(0, 256, (count, width), np.uint8)
        at = SCALE_AT.get(kind.name, 0)
        scales = np.linspace(0.001, 0.01, count).astype("<f2")
        for place in (at, LEAST_AT.get(kind.name, at)):
            made[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
        return made.reshape(*values.shape[:-1], -1)


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _groups(config: Mapping[str, Any]) -> Any:
    if config.get("multi_query") and not config["new_decoder_architecture"]:
        return 1
    groups = _first(config, "num_key_value_heads", "num_kv_heads")
    return (
        [0 if one == "conv" else groups for one in config["layer_types"]] if config["model_type"] == "lfm2" else groups
    )


def _add_sizes(writer: GGUFWriter, config: Mapping[str, Any]) -> None:  # noqa: C901, PLR0912, PLR0915 - one line per field
    width, heads = (
        _first(config, "hidden_size", "n_embd", "d_model"),
        _first(config, "num_attention_heads", "n_head", "n_heads"),
    )
    layers = _first(config, "num_hidden_layers", "n_layer", "n_layers")
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    writer.add_context_length(_first(config, "max_position_embeddings", "n_positions", "max_seq_len") or 2048)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_feed_forward_length(_first(config, "intermediate_size", "n_inner", "ffn_hidden_size") or 4 * width)
    writer.add_head_count(heads)
    if (groups := _groups(config)) and "kv_lora_rank" not in config:
        writer.add_head_count_kv(groups)
    if theta := full.get("rope_theta") or config.get("rope_theta"):
        writer.add_rope_freq_base(theta)
    if (head_dim := config.get("head_dim")) and "kv_lora_rank" not in config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1)))
    if config["model_type"] == "stablelm":
        writer.add_rope_dimension_count(int(full["partial_rotary_factor"] * width // heads))
    if config["model_type"] == "lfm2":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if epsilon := _first(config, "rms_norm_eps", "norm_eps"):
        writer.add_layer_norm_rms_eps(epsilon)
    else:
        writer.add_layer_norm_eps(_first(config, "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"))
    if experts := _first(config, "num_local_experts", "num_experts", "n_routed_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if size := config.get("intermediate_size" if config["model_type"] == "gpt_oss" else "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(size)
    if config.get("sliding_window") and config["model_type"] in WINDOWS:
        writer.add_sliding_window(config["sliding_window"])
    if cap := config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(cap)
    if cap := config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)
    if config["model_type"] == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config.get("logit_scale"):
        writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] == "mpt":
        writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])
    if config["model_type"] == "phi3":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if full.get("rope_type") == "longrope":
            ratio = log(config["max_position_embeddings"] / original)
            writer.add_rope_scaling_attn_factors(sqrt(1 + ratio / log(original)))


def _add_latent(writer: GGUFWriter, config: Mapping[str, Any], *, older: bool) -> None:
    """Keys of DeepSeek, in the order of llama.cpp's converter."""
    rank, turned, value = (config[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    key = config["qk_nope_head_dim"] + turned
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_head_count_kv(config["num_attention_heads"] if older else 1)
    writer.add_key_length(key if older else rank + turned)
    writer.add_value_length(value if older else rank)
    if not older:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
        for name, add in (
            ("n_group", writer.add_expert_group_count),
            ("topk_group", writer.add_expert_group_used_count),
        ):
            if config.get(name) is not None:
                add(config[name])
    sigmoid = config["model_type"] == "deepseek_v3"
    if sigmoid or not older:
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID if sigmoid else ExpertGatingFuncType.SOFTMAX)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    writer.add_rope_dimension_count(turned)


def _divided(tensors: Mapping[str, Values], config: Mapping[str, Any], *, older: bool) -> dict[str, Values]:
    """The tensors with those of GPT-OSS and DeepSeek in the parts that llama.cpp has."""
    found: dict[str, Values] = {}
    for name, values in tensors.items():
        if config["model_type"] == "gpt_oss" and ".experts." in name:
            kind = "bias" if name.endswith("_bias") else "weight"
            turned = values if kind == "bias" else values.swapaxes(1, 2)
            whole = name.removesuffix("_bias")
            if whole.endswith("gate_up_proj"):
                for first, part in enumerate(("gate", "up")):
                    found[f"{whole.replace('gate_up', part)}.{kind}"] = turned[:, first::2]
            else:
                found[f"{whole}.{kind}"] = turned
        elif name.endswith("kv_b_proj.weight") and not older:
            both = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            found[name.replace("kv_b", "k_b")] = both[:, : config["qk_nope_head_dim"]].swapaxes(1, 2)
            found[name.replace("kv_b", "v_b")] = both[:, config["qk_nope_head_dim"] :]
        else:
            full = f"{name}.weight" if name.endswith("sinks") else name
            found[full.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    return found


def _renamed(tensors: Mapping[str, Values], config: Mapping[str, Any], arch: str) -> dict[str, Values]:
    """The tensors under llama.cpp's names, changed as its converter changes them."""
    layers = _first(config, "num_hidden_layers", "n_layer", "n_layers")
    names = get_tensor_name_map({name: key for key, name in MODEL_ARCH_NAMES.items()}[arch], layers)
    stacks: dict[str, dict[int, Values]] = {}
    found: dict[str, Values] = {}
    for name, values in tensors.items():
        before, _, number = name.partition(".experts.")
        if number[:1].isdigit():
            expert, _, part = number.partition(".")
            stacks.setdefault(f"{before}.experts.{part}", {})[int(expert)] = values
            continue
        if config.get("tie_word_embeddings") and name == "lm_head.weight":
            continue
        found[_name(names, name)] = _changed(name, values, config)
    for name, parts in stacks.items():
        joined = (
            name.replace("block_sparse_moe.", "feed_forward.").replace("model.", "") if "block_sparse" in name else name
        )
        found[_name(names, joined)] = np.stack([parts[number] for number in sorted(parts)])
    return found


def _name(names: Any, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias")) or names.get_name(
        name.removeprefix("transformer."), try_suffixes=(".weight", ".bias")
    )
    assert found, name
    return str(found)


def _changed(name: str, values: Values, config: Mapping[str, Any]) -> Values:
    kind = config["model_type"]
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    if kind in ("llama", "mistral", "mixtral", "granite", "smollm3") and ("q_proj." in name or "k_proj." in name):
        count = heads if "q_proj." in name else config["num_key_value_heads"]
        return (
            values.reshape(count, 2, len(values) // count // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        )
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return values.T
    if name.endswith("conv.conv.weight"):
        return values[:, 0]
    if "query_key_value" in name:
        groups = _groups(config) or heads
        each = values.reshape(groups, heads // groups + 2, -1, *values.shape[1:])
        parts = each[:, :-2], each[:, -2:-1], each[:, -1:]
        return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
    return values


def padded(count: int, rows: int) -> list[str]:
    """The tokens that llama.cpp's converter adds where an embedding has more rows than a vocabulary."""
    return [f"[PAD{number}]" for number in range(count, rows)]


def byte_level(content: Mapping[str, Any], pre: str, *, bos: int, eos: int, rows: int) -> Callable[[GGUFWriter], None]:
    """Adds the vocabulary of a byte-level `tokenizer.json`."""
    ids = dict(content["model"]["vocab"]) | {token["content"]: token["id"] for token in content["added_tokens"]}
    special = {token["id"]: token["special"] for token in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)

    def add(writer: GGUFWriter) -> None:
        kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED}
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        more = padded(len(tokens), rows)
        writer.add_token_list([*tokens, *more])
        types = [kinds[special[ids[one]]] if ids[one] in special else TokenType.NORMAL for one in tokens]
        writer.add_token_types([*types, *[TokenType.UNUSED] * len(more)])
        writer.add_token_merges(
            [" ".join(pair) if isinstance(pair, list) else pair for pair in content["model"]["merges"]]
        )
        writer.add_bos_token_id(bos)
        writer.add_eos_token_id(eos)

    return add
