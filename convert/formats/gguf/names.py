"""llama.cpp's architectures: names of tensors, and what its converter changes in tensors.

Sources: llama.cpp `conversion/*.py` (what its converter does to each family), `gguf-py/gguf/tensor_mapping.py` (names).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmconv.checkpoint import transposed
from llmconv.convert.algebra import fitting, interleave_rows, permute_rows, renamed, reshaped, rope_order, slice_rows
from llmconv.convert.formats.gguf import configs
from llmconv.convert.formats.gguf.configs import FREQUENCIES, HINT, LONG, Keys, Tensors
from llmconv.convert.formats.gguf.parts import LAYER, AlternatingExperts, Experts, Latent, Parts
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.files.safetensors_file import FileTensor
from llmconv.files.weight_ranges import AdjustedTensor
from llmconv.tensors import LazyTensor


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`."""

    model_type: str
    names: Mapping[str, str | None]  # with `{}` for the number of the layer
    # the fields of `config.json`, but for those that all architectures share
    config: Callable[[Keys, Tensors], dict[str, Any]]
    # undoes what the converter did: `change(name, tensor, config)` for each tensor, by Hugging Face's name
    change: Callable[[str, LazyTensor, Mapping[str, Any]], LazyTensor] = lambda name, tensor, config: tensor
    parts: tuple[Parts, ...] = ()  # tensors that a file divides differently; `change` does not see them
    # names of stored matrices that are transposed in the model, so that codes cannot be kept; None if there are none
    turned: re.Pattern[str] | None = None


HEAD_ORDERED = ("llama", "mistral", "mixtral", "granite", "smollm3")  # model types whose files rotate neighbors
ONE_LESS = ("gemma", "gemma2", "gemma3_text")  # model types whose norms are stored plus one
TURNED = re.compile(r"\.c_(?:attn|proj|fc)\.weight$")

# --- tensors ----------------------------------------------------------------------------------------------------------


def _neighbors(name: str, tensor: LazyTensor, config: Mapping[str, Any]) -> LazyTensor:
    """Llama: rows of queries and keys in transformers' order, which rotates halves and not neighbors."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
        return tensor
    if isinstance(tensor, FileTensor):
        return AdjustedTensor(tensor, pairs=len(rope_order(config["head_dim"])))
    return permute_rows(tensor, rope_order(config["head_dim"]))


def _less_one(name: str, tensor: LazyTensor, config: Mapping[str, Any]) -> LazyTensor:
    """Gemma: norms without the 1 that its model adds; float32."""
    if not name.endswith("norm.weight"):
        return tensor
    if isinstance(tensor, FileTensor) and tensor.dtype.name == "float32":
        return AdjustedTensor(tensor, added=-1.0)
    return LazyTensor(
        tensor.dtype,
        tensor.shape,
        lambda start, stop: (tensor.rows(start, stop).astype(np.float32) - np.float32(1)).astype(tensor.dtype.numpy),
    )


def _columns(name: str, tensor: LazyTensor, config: Mapping[str, Any]) -> LazyTensor:
    """GPT-2: matrices of its `Conv1D` are [in, out]."""
    return transposed(tensor) if TURNED.search(name) else tensor


def _channels(name: str, tensor: LazyTensor, config: Mapping[str, Any]) -> LazyTensor:
    """LFM2: kernels [channels, length] as those of a convolution of single channels, [channels, 1, length]."""
    if not name.endswith("conv.conv.weight"):
        return tensor
    if len(tensor.shape) != 2:
        raise ValueError(f"`{name}` has the shape {list(tensor.shape)}")
    return reshaped(tensor, (tensor.shape[0], 1, tensor.shape[1]))


def _dealt(name: str, tensor: LazyTensor, config: Mapping[str, Any], groups: str = "n_head") -> LazyTensor:
    """Bloom, Falcon: queries, keys and values of each group of heads, in place of all queries, all keys, all values."""
    if "query_key_value" not in name:
        return tensor
    heads = config.get("n_head") or config["num_attention_heads"]
    width, count = config["hidden_size"] // heads, config[groups]
    ends = [heads * width, heads * width + count * width, heads * width + 2 * count * width]
    if tensor.num_rows != ends[-1] or heads % count:
        raise ValueError(f"{tensor.num_rows} rows of queries, keys and values, expected {ends[-1]}")
    parts = [slice_rows(tensor, start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
    return interleave_rows(parts, [heads // count * width, width, width])


def _modules(**names: str) -> dict[str, str | None]:
    """Weights and biases of modules of a layer."""
    return {f"blk.{{}}.{ours}.{kind}": f"{LAYER}{name}.{kind}" for ours, name in names.items() for kind in PARTS}


def _weights(**names: str) -> dict[str, str | None]:
    """Weights of modules of a layer that have no biases."""
    return {f"blk.{{}}.{ours}.weight": f"{LAYER}{name}.weight" for ours, name in names.items()}


PARTS = ("weight", "bias")
ENDS: dict[str, str | None] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    FREQUENCIES: None,
}
ATTENTION = _modules(
    attn_norm="input_layernorm",
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.o_proj",
)
HEAD_NORMS = _modules(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
GATED = _modules(ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
LLAMA = {**ENDS, **ATTENTION, **_modules(ffn_norm="post_attention_layernorm"), **GATED}
GEMMA2 = {
    **ENDS,
    **ATTENTION,
    **GATED,
    **_modules(
        post_attention_norm="post_attention_layernorm",
        ffn_norm="pre_feedforward_layernorm",
        post_ffw_norm="post_feedforward_layernorm",
    ),
}


def _other(layer: str, ends: Mapping[str, str], modules: Mapping[str, str]) -> dict[str, str | None]:
    """Names of families before Llama: `ends` outside of the layers, `modules` in a layer."""
    outside: dict[str, str | None] = {
        f"{ours}.{kind}": f"{name}.{kind}" for ours, name in ends.items() for kind in PARTS
    }
    return outside | {
        f"blk.{{}}.{ours}.{kind}": f"{layer}{name}.{kind}" for ours, name in modules.items() for kind in PARTS
    }


GPT2 = _other(
    "transformer.h.{}.",
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
)
BLOOM = _other(
    "transformer.h.{}.",
    {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)
MPT = _other(
    "transformer.blocks.{}.",
    {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
    {
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
)
# of two norms before a layer, llama.cpp names that of the feed-forward part first
FALCON_TWO_NORMS = BLOOM | _other("transformer.h.{}.", {}, {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
PHI3 = {
    **ENDS,
    **dict.fromkeys(LONG),
    **_modules(attn_norm="input_layernorm", attn_qkv="self_attn.qkv_proj", attn_output="self_attn.o_proj"),
    **_modules(ffn_norm="post_attention_layernorm", ffn_up="mlp.gate_up_proj", ffn_down="mlp.down_proj"),
}
STARCODER2 = LLAMA | _modules(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")
ROUTER = _modules(ffn_gate_inp="mlp.gate")
NO_FREQUENCIES = {name: target for name, target in ENDS.items() if name != FREQUENCIES}
GPT_OSS = {
    **NO_FREQUENCIES,
    **ATTENTION,
    **_modules(post_attention_norm="post_attention_layernorm", ffn_gate_inp="mlp.router"),
    "blk.{}.attn_sinks.weight": f"{LAYER}self_attn.sinks",
}
DEEPSEEK = {
    **NO_FREQUENCIES,
    **_weights(
        attn_norm="input_layernorm",
        attn_q="self_attn.q_proj",
        attn_q_a="self_attn.q_a_proj",
        attn_q_a_norm="self_attn.q_a_layernorm",
        attn_q_b="self_attn.q_b_proj",
        attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
        attn_kv_a_norm="self_attn.kv_a_layernorm",
        attn_kv_b="self_attn.kv_b_proj",
        attn_output="self_attn.o_proj",
        ffn_norm="post_attention_layernorm",
        ffn_gate="mlp.gate_proj",
        ffn_up="mlp.up_proj",
        ffn_down="mlp.down_proj",
        ffn_gate_inp="mlp.gate",
        ffn_gate_shexp="mlp.shared_experts.gate_proj",
        ffn_up_shexp="mlp.shared_experts.up_proj",
        ffn_down_shexp="mlp.shared_experts.down_proj",
    ),
    "blk.{}.exp_probs_b.bias": f"{LAYER}mlp.gate.e_score_correction_bias",
}
OLMO2 = {
    **ENDS,
    **ATTENTION,
    **HEAD_NORMS,
    **GATED,
    **_modules(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm"),
}
GLM4 = {
    **ENDS,
    **ATTENTION,
    **_modules(post_attention_norm="post_self_attn_layernorm", ffn_norm="post_attention_layernorm"),
    **_modules(ffn_up="mlp.gate_up_proj", ffn_down="mlp.down_proj", post_ffw_norm="post_mlp_layernorm"),
}
LFM2 = {
    **{name: target for name, target in ENDS.items() if not name.startswith("output_norm.")},
    "token_embd_norm.weight": "model.embedding_norm.weight",
    **ATTENTION,
    **_modules(attn_norm="operator_norm", attn_output="self_attn.out_proj", ffn_norm="ffn_norm"),
    **_modules(attn_q_norm="self_attn.q_layernorm", attn_k_norm="self_attn.k_layernorm"),
    **_modules(ffn_gate="feed_forward.w1", ffn_down="feed_forward.w2", ffn_up="feed_forward.w3"),
    **_modules(**{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}),
}
HUNYUAN = LLAMA | _modules(attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm")
EXPERTS = Experts("mlp.experts.{}.{}.weight", {"gate": "gate_proj", "down": "down_proj", "up": "up_proj"})
BLOCK_SPARSE = Experts("block_sparse_moe.experts.{}.{}.weight", {"gate": "w1", "down": "w2", "up": "w3"})

MIXTRAL = LLAMA | _modules(ffn_gate_inp="block_sparse_moe.gate")

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", MIXTRAL, configs.llama, _neighbors, (BLOCK_SPARSE,)),
    "granite": Architecture("granite", LLAMA, configs.granite, _neighbors),
    "smollm3": Architecture("smollm3", LLAMA, configs.decoder, _neighbors),
    "qwen2": Architecture("qwen2", LLAMA, configs.qwen),
    "qwen3": Architecture("qwen3", LLAMA | HEAD_NORMS, configs.qwen),
    "qwen3moe": Architecture("qwen3_moe", LLAMA | HEAD_NORMS | ROUTER, configs.qwen_moe, parts=(EXPERTS,)),
    "gemma": Architecture("gemma", LLAMA, configs.gemma, _less_one),
    "gemma2": Architecture("gemma2", GEMMA2, configs.gemma2, _less_one),
    "gemma3": Architecture("gemma3_text", GEMMA2 | HEAD_NORMS, configs.gemma3, _less_one),
    "phi3": Architecture("phi3", PHI3, configs.phi3),
    "starcoder2": Architecture("starcoder2", STARCODER2, configs.starcoder2),
    "gpt2": Architecture("gpt2", GPT2, configs.gpt2, _columns, turned=re.compile(r"blk\.\d+\..*")),
    "bloom": Architecture("bloom", BLOOM, configs.bloom, _dealt),
    "falcon": Architecture("falcon", BLOOM, configs.falcon, partial(_dealt, groups="num_kv_heads")),
    "mpt": Architecture("mpt", MPT, configs.mpt),
    "gpt-oss": Architecture("gpt_oss", GPT_OSS, configs.gpt_oss, parts=(AlternatingExperts(),)),
    "ernie4_5": Architecture("ernie4_5", LLAMA, configs.decoder),
    "olmo2": Architecture("olmo2", OLMO2, configs.decoder),
    "command-r": Architecture("cohere", LLAMA | HEAD_NORMS, configs.cohere),
    "cohere2": Architecture("cohere2", LLAMA, configs.cohere2),
    "glm4": Architecture("glm4", GLM4, configs.glm4),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", HUNYUAN, configs.decoder),
    "stablelm": Architecture("stablelm", LLAMA, configs.stablelm),
    "exaone4": Architecture("exaone4", OLMO2, configs.exaone4),
    "lfm2": Architecture("lfm2", LFM2, configs.lfm2, _channels),
    "deepseek2": Architecture("deepseek_v3", DEEPSEEK, configs.deepseek, parts=(EXPERTS, Latent())),
}


def in_hugging_face_names(keys: Keys, tensors: Tensors) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """Configuration and tensors of the model; fields that a file has for its vocabulary are not in it.

    Raises MalformedInput for keys or tensors that are missing or contradict each other, UnsupportedInput for another
    architecture.
    """
    family = ARCHITECTURES.get(keys.architecture)
    if family is None:
        raise UnsupportedInput(
            f"`{keys.source}` has the unsupported architecture `{keys.architecture}`",
            hint=f"supported are {', '.join(ARCHITECTURES)}; give the Hugging Face folder that it was converted from",
        )
    config = {"model_type": family.model_type, **family.config(keys, tensors)}
    keys.refuse_others()
    names = FALCON_TWO_NORMS if config.get("num_ln_in_parallel_attn") == 2 else family.names
    stored, found = dict(tensors), dict[str, LazyTensor]()
    with fitting(f"the tensors of `{keys.source}` do not match its metadata", HINT):
        for parts in family.parts:
            found |= parts.read(keys, stored, config)
        rest = renamed(stored, names, keys.source)
        if twice := sorted(rest.keys() & found.keys()):
            raise MalformedInput(f"`{keys.source}` has tensors whole and in parts: {listing(twice)}", hint=HINT)
        return config, {name: family.change(name, tensor, config) for name, tensor in rest.items()} | found
