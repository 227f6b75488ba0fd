"""MindFormers' models in transformers' terms, and back.

Llama 1 to 3, qwen 1 to 3, internlm 1 and 2, baichuan 1 and 2 (7B): weights are out×in and rotate halves, as in
transformers. Source: mindformers `models/llama/{llama,llama_config,convert_reversed}.py`, `modules/layers.py`
(`FreqsMgr`) and `research/{qwen,internlm,internlm2,baichuan2}`.

ChatGLM2 and 3 are transformers' `glm`, which computes the same; ChatGLM-6B is its published code. Source: `models/glm2/
{glm2,glm2_config,glm2_transformer,glm2_modules,convert_weight}.py`. Both rotate neighbors in the first half of each
head; since 1.5 `use_rearrange_rope` stores even rows before odd ones. ChatGLM-6B: `models/glm/{glm,glm_config,
convert_reversed}.py`; only norms and the embedding have other names.

gpt2 and bloom: three dense matrices per attention, feed-forward and output weights stored in×out. Source:
`models/{gpt2,bloom}/{convert_weight,*_config}.py`, `modules/transformer` (`MultiHeadAttention`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmconv.checkpoint import transposed
from llmconv.convert import algebra
from llmconv.convert.formats.mindformers.config import (
    BLOOM,
    CHATGLM_6B,
    CORE,
    DENSE,
    EMBEDDING,
    GLM,
    GPT2,
    HEAD,
    LLAMA,
    QWEN,
    ConvertedModel,
    MindFormersModel,
    RunConfig,
    check_embedding_sizes,
    finish,
    heads_of,
    refuse_model,
    require_embedding,
    split_qkv,
    unfuse,
)
from llmconv.convert.models.code_model import baichuan, chatglm, needs_code
from llmconv.convert.models.config_file import trusted_code
from llmconv.convert.models.model_config import ModelSettings, refuse, refuse_settings
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, short
from llmconv.tensors import Array, LazyTensor

BAICHUAN2_VOCABULARY = 125696
NORM_HEAD_EPS = 1e-5

SCALING = {  # ModelSettings of rotary methods, by `extend_method`
    "LLAMA3": ("factor", "low_freq_factor", "high_freq_factor"),
    "YARN": ("factor", "beta_fast", "beta_slow"),
}

ORIGINAL = "original_max_position_embeddings"
# Largest `seq_length` written by default: it sizes the buffers of a run and is not a property of the model
SEQ_LENGTH = 4096
WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers")


def build_llama(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """A model in Llama's names (else MalformedInput), by biases and class; UnsupportedInput: Baichuan without code."""
    if re.search(r"Baichuan.*13B", run.arch, re.IGNORECASE) or run.flag("use_alibi"):
        reason = "the Llama of transformers has no ALiBi"
        code = needs_code(trusted_code(run.values), run.source, f"a {run.arch or 'Llama'} with ALiBi", reason)
        model = _build(run, tensors, LLAMA, "llama")  # its code normalizes the head of a Baichuan 2
        return ConvertedModel(*baichuan(model.tensors, model.config, code, run.source), model.warnings)
    if embedding := tensors.get("model.tok_embeddings.embedding_weight"):
        tensors = _baichuan2(run, tensors, embedding.num_rows)
    return _build(run, tensors, LLAMA, "llama")


def build_qwen(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """Qwen 1 as `qwen2`, which computes the same within the trained length."""
    if fused := next((name for name in tensors if "w_gate_hidden" in name), None):
        raise refuse_model(run, f"a Qwen 1 with fused feed-forward (`{fused}`)", "the order of its parts is unknown")
    model = _build(run, tensors, QWEN, "qwen2")
    note = "converted Qwen 1 to `qwen2`, which lacks its dynamic NTK and logn attention beyond the trained length"
    return ConvertedModel(model.tensors, model.config, (*model.warnings, note))


def build_core(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """A model in Megatron's names, by norms and biases; InputRefused for a YAML without the `config.json`."""
    run.number("rms_norm_eps")
    rope_settings(run, usual=None)
    return _build(run, tensors, CORE, "qwen3" if any(".q_layernorm." in name for name in tensors) else "llama")


def _build(run: RunConfig, tensors: dict[str, LazyTensor], names: dict[str, str | None], kind: str) -> ConvertedModel:
    activation = run.values.get("hidden_act") or "silu"
    if activation not in ("silu", "swiglu"):
        raise refuse_model(run, f"a Llama with `hidden_act` {short(activation)}", "its feed-forward is SwiGLU")
    embedding = require_embedding(
        run, next((tensors[name] for name, to in names.items() if to == EMBEDDING and name in tensors), None)
    )
    heads = heads_of(run, embedding.shape[1])
    renamed = algebra.renamed(unfuse(run, tensors, heads), names, run.source)
    biases = {one for one in "qkvo" if f"model.layers.0.self_attn.{one}_proj.bias" in renamed}
    if biases not in (set(), set("qkv"), set("qkvo")):
        raise refuse_model(run, f"a Llama with biases on {sorted(biases)}", "its biases are on q, k, v, or on all four")
    if kind == "llama" and biases == set("qkv"):
        kind = "qwen2"
    gate = renamed.get("model.layers.0.mlp.gate_proj.weight")
    config = {
        "model_type": kind,
        **check_embedding_sizes(run, embedding),
        "intermediate_size": gate.num_rows if gate else 0,
        "num_hidden_layers": run.layers("num_layers", "num_hidden_layers"),
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.keys,
        "head_dim": heads.dim,
        "hidden_act": "silu",
        "max_position_embeddings": run.count(
            "max_position_embedding", "max_position_embeddings", "seq_length", default=2048
        ),
        "rms_norm_eps": run.number("rms_norm_eps", "layernorm_epsilon", default=1e-5),
        **rope_settings(run),
        **{name: run.values[name] for name in WINDOW if name in run.values and run.flag("use_sliding_window")},
        **run.tokens(bos_token_id=1, eos_token_id=2),
    }
    if kind == "qwen3" and biases:
        raise refuse_model(run, f"a Qwen 3 with biases on {sorted(biases)}", "it has none")
    if kind != "qwen2":
        config |= {"attention_bias": bool(biases), "mlp_bias": False}
    return finish(run, renamed, config)


def rope_settings(run: RunConfig, usual: float | None = 10000.0) -> dict[str, Any]:
    """`rope_theta` (default `usual`) and `rope_scaling` (`FreqsMgr`); UnsupportedInput for another formula."""
    method = str(run.values.get("extend_method") or "None").upper()
    factor = run.values.get("scaling_factor", 1.0)
    ready = run.values.get("rope_scaling") or run.values.get("rope_parameters")
    if isinstance(ready, dict):  # a configuration in transformers' fields
        fields = RunConfig({**run.values, **ready}, run.source)
        return {"rope_theta": fields.number("rope_theta", "theta", default=usual), "rope_scaling": dict(ready)}
    theta = run.number("theta", "rope_theta", "rotary_emb_base", default=usual)
    if method == "NONE":
        return {"rope_theta": theta}
    if method == "NTK":
        return {"rope_theta": theta * run.number("scaling_factor", default=1.0)}
    if method == "PI":
        factor = run.number("scaling_factor", default=1.0)
        return {"rope_theta": theta, "rope_scaling": {"rope_type": "linear", "factor": factor}}
    if method in SCALING and isinstance(factor, dict):
        # transformers' `rope_scaling` for the two methods that have their own settings
        numbers = RunConfig(factor, run.source)
        old = {ORIGINAL: numbers.count(ORIGINAL)}
        found: dict[str, Any] = {name: numbers.number(name) for name in SCALING[method]}
        found = {"rope_type": method.lower(), **found, **old}
        if method == "YARN":  # FreqsMgr scales the rotary table by this quotient
            log = 0.1 * math.log(max(1.0, found["factor"]))
            whole, part = (1.0 + log * numbers.number(name, least=-1) for name in ("mscale", "mscale_all_dim"))
            found["attention_factor"] = whole / part
        return {"rope_theta": theta, "rope_scaling": found}
    raise refuse_model(run, f"a model with `extend_method` {method[:40]}", "its rotary formula differs")


FIXED: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False, "sliding_window": None}
QKV, GATE_UP = tuple(f"linear_{one}" for one in "qkv"), ("gating", "hidden")


def store_llama(settings: ModelSettings, tensors: dict[str, LazyTensor], source: str) -> MindFormersModel:
    """A Llama or Qwen 2 unfused, so that no `qkv_layout` is needed; UnsupportedInput for a setting it lacks."""
    refuse_settings(source, settings, FIXED, "MindFormers")
    if settings["head_dim"] * settings["num_attention_heads"] != settings["hidden_size"]:
        refuse(source, {"head_dim": settings["head_dim"]}, "MindFormers")
    kind = "InternLM" if settings["attention_bias"] else "Llama"  # the same, with biases on all four
    fields = {
        "type": f"{kind}Config",
        "hidden_size": settings["hidden_size"],
        "num_layers": settings["num_hidden_layers"],
        "num_heads": settings["num_attention_heads"],
        "n_kv_heads": settings["num_key_value_heads"],
        "intermediate_size": settings["intermediate_size"],
        "vocab_size": settings["vocab_size"],
        "max_position_embedding": settings["max_position_embeddings"],
        "seq_length": min(settings["max_position_embeddings"], SEQ_LENGTH),
        "rms_norm_eps": settings["rms_norm_eps"],
        "theta": settings["rope_theta"],
        **_extension(settings["rope_scaling"] or {}),
        "qkv_has_bias": settings["attention_bias"] or settings["model_type"] == "qwen2",
        **({"wo_has_bias": True} if settings["attention_bias"] else {}),
        "qkv_concat": False,
        "tie_word_embeddings": settings["tie_word_embeddings"],
    }
    return MindFormersModel(algebra.renamed(tensors, algebra.inverted(LLAMA), source), f"{kind}ForCausalLM", fields)


def _extension(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """`extend_method` and `scaling_factor`; empty if the formula of MindFormers differs."""
    names = (*SCALING["LLAMA3"], ORIGINAL)
    if scaling.get("rope_type") == "linear" and "factor" in scaling:
        return {"extend_method": "PI", "scaling_factor": scaling["factor"]}
    if scaling.get("rope_type") == "llama3" and all(name in scaling for name in names):
        return {"extend_method": "LLAMA3", "scaling_factor": {name: scaling[name] for name in names}}
    return {}


def store_core(settings: ModelSettings, tensors: dict[str, LazyTensor], source: str) -> MindFormersModel:
    """A Qwen 3 in Megatron's names, fused, with transformers' fields; UnsupportedInput for a setting it lacks."""
    refuse_settings(source, settings, {**FIXED, "attention_bias": False}, "MindFormers")
    group = settings["num_attention_heads"] // settings["num_key_value_heads"] * settings["head_dim"]
    counts = (group, settings["head_dim"], settings["head_dim"])
    parts = algebra.fuse(
        algebra.renamed(tensors, algebra.inverted(CORE), source),
        QKV,
        "linear_qkv",
        lambda qkv: algebra.interleave_rows(qkv, counts),
    )
    parts = algebra.fuse(parts, GATE_UP, "linear_fc1", lambda sides: algebra.interleave_rows(sides, (1, 1)))
    same = ("rope_scaling", "rope_theta", "tie_word_embeddings", "max_position_embeddings", "rms_norm_eps")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names = (*sizes, "num_key_value_heads", "head_dim", *same)
    fields = {"type": "Qwen3Config", **{name: settings[name] for name in names if settings[name] is not None}}
    return MindFormersModel(parts, "Qwen3ForCausalLM", fields)


def _baichuan2(run: RunConfig, tensors: dict[str, LazyTensor], vocabulary: int) -> dict[str, LazyTensor]:
    """Normalizes the head of Baichuan 2, as its `NormHead`; InputRefused if it is unknown whether it is one."""
    if vocabulary == BAICHUAN2_VOCABULARY and not run.arch:
        raise InputRefused(
            f"`{run.source}` has the vocabulary of Baichuan 2, whose head is normalized, but its class is unknown",
            hint="give the YAML file of the run, with `model.arch.type`",
        )
    if not re.match(r"Baichuan.*V2", run.arch, re.IGNORECASE) or HEAD not in tensors:
        return tensors
    head = tensors[HEAD]

    def load(start: int, stop: int) -> Array:  # divides each row by √(Σw² + 1e-5), rounded once
        rows = head.rows(start, stop).astype(np.float64)
        normalized: Array = (rows / np.sqrt((rows**2).sum(1, keepdims=True) + NORM_HEAD_EPS)).astype(head.dtype.numpy)
        return normalized

    return {**tensors, HEAD: LazyTensor(head.dtype, head.shape, load)}


GLM_QKV = re.compile(r"(.+\.self_attn)\.query_key_value\.(weight|bias)")

GLM_FIXED = {  # options that `glm` does not have, with the value that it implements
    "rmsnorm": True,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "post_self_attn_layernorm": False,
    "post_mlp_layernorm": False,
}


def build_glm(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """ChatGLM2 or ChatGLM3 as `glm`; UnsupportedInput for an option, MalformedInput for names or shapes."""
    changed = [name for name, usual in GLM_FIXED.items() if run.values.get(name) not in (None, usual)]
    if changed or run.values.get("pre_seq_len"):
        raise refuse_model(run, f"a ChatGLM with `{(changed or ['pre_seq_len'])[0]}` set", "`glm` has no such option")
    renamed = algebra.renamed(tensors, GLM, run.source)
    embedding = require_embedding(run, renamed.get(EMBEDDING))
    hidden = embedding.shape[1]
    fields = {"num_attention_heads": 32, "kv_channels": 128, **run.values}
    multi = run.values.get("multi_query_attention", True)
    keys = fields.get("multi_query_group_num", 2) if multi else fields["num_attention_heads"]
    heads = heads_of(replace(run, values={**fields, "num_key_value_heads": keys, "n_kv_heads": keys}), hidden)
    parts: dict[str, LazyTensor] = {}
    with algebra.fitting(f"the layers of `{run.source}` cannot be split"):
        for name, tensor in renamed.items():
            if fused := GLM_QKV.fullmatch(name):
                rows = zip("qkv", split_qkv(tensor, heads, "plain"), strict=True)
                parts |= {f"{fused[1]}.{one}_proj.{fused[2]}": part for one, part in rows}
            else:
                parts[name] = tensor
        parts = algebra.fuse(parts, ("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj")
        if run.flag("use_rearrange_rope"):
            # row `2i + j` of a query or key head is row `j·D/2 + i`, which undoes `rearrange_w`
            order = [row % 2 * (heads.dim // 2) + row // 2 for row in range(heads.dim)]
            parts = algebra.reordered(parts, re.compile(r"\.[qk]_proj\."), order)
    gate_up = parts.get("model.layers.0.mlp.gate_up_proj.weight")
    config = {
        "model_type": "glm",
        "vocab_size": embedding.num_rows,
        "hidden_size": run.count("hidden_size", default=hidden),
        "intermediate_size": gate_up.num_rows // 2 if gate_up else 0,
        "num_hidden_layers": run.layers("num_layers", default=28),
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.keys,
        "head_dim": heads.dim,
        "partial_rotary_factor": 0.5,
        "hidden_act": "silu",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in parts,
        "max_position_embeddings": run.count("seq_length", default=2048),
        "rms_norm_eps": run.number("layernorm_epsilon", default=1e-5),
        "rope_theta": 10000.0 * run.number("rope_ratio", default=1.0),
        **run.tokens(bos_token_id=None, eos_token_id=2, pad_token_id=0),
    }
    return finish(run, parts, config)


def store_glm(settings: ModelSettings, tensors: dict[str, LazyTensor], source: str) -> MindFormersModel:
    """`glm` as ChatGLM3, with whole queries, keys, values; UnsupportedInput for a setting that it does not have."""
    held = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 0.5, "rope_scaling": None}
    refuse_settings(source, settings, held, "MindFormers")
    parts = algebra.fuse(tensors, tuple(f"{one}_proj" for one in "qkv"), "query_key_value")
    renamed = algebra.renamed(parts, algebra.inverted(GLM), source)
    fields = {
        "type": "ChatGLM2Config",
        "num_layers": settings["num_hidden_layers"],
        "vocab_size": settings["vocab_size"],
        "padded_vocab_size": settings["vocab_size"],
        "hidden_size": settings["hidden_size"],
        "ffn_hidden_size": settings["intermediate_size"],
        "kv_channels": settings["head_dim"],
        "num_attention_heads": settings["num_attention_heads"],
        "multi_query_attention": True,
        "multi_query_group_num": settings["num_key_value_heads"],
        "seq_length": settings["max_position_embeddings"],
        "layernorm_epsilon": settings["rms_norm_eps"],
        "rope_ratio": settings["rope_theta"] / 10000.0,
        "add_qkv_bias": settings["attention_bias"],
        "tie_word_embeddings": settings["tie_word_embeddings"],
        **GLM_FIXED,
    }
    return MindFormersModel(renamed, "ChatGLM2ForConditionalGeneration", fields)


def build_chatglm_6b(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """ChatGLM-6B in its code's names; UnsupportedInput: no code, a prefix; MalformedInput: wrong names."""
    reason = "it has two rotary positions per token, which no model of transformers has"
    code = needs_code(trusted_code(run.values), run.source, "a ChatGLM-6B", reason)
    if run.values.get("pre_seq_len"):
        raise UnsupportedInput(
            f"`{run.source}` is a ChatGLM-6B with a prefix (`pre_seq_len`)", hint="convert the model without the prefix"
        )
    renamed = algebra.renamed(tensors, CHATGLM_6B, run.source)
    embedding = require_embedding(run, renamed.get("transformer.word_embeddings.weight"))
    up = renamed.get("transformer.layers.0.mlp.dense_h_to_4h.weight")
    heads = run.count("num_heads", "num_attention_heads", default=32)
    if embedding.shape[1] % (4 * heads):
        raise MalformedInput(
            f"the hidden size {embedding.shape[1]} of `{run.source}` is not a multiple of four times {heads} heads",
            hint="the configuration belongs to another model; give the YAML file of the run with `--config`",
        )
    fields = {
        **check_embedding_sizes(run, embedding),
        "num_layers": run.layers("num_layers", "num_hidden_layers", default=28),
        "num_attention_heads": heads,
        "inner_hidden_size": up.num_rows if up else 0,
        "max_sequence_length": run.count("seq_length", default=2048),
        "layernorm_epsilon": run.number("layernorm_epsilon", default=1e-5),
        "position_encoding_2d": True,
        **run.tokens(bos_token_id=None, eos_token_id=None, pad_token_id=None, gmask_token_id=None),
    }
    return ConvertedModel(*chatglm(renamed, fields, code, run.source))


BLOOM_LENGTH = 2048  # sequence length of BLOOM's training; ALiBi itself has no limit


BLOOM_IN_OUT = re.compile(r"\.(?:dense|dense_h_to_4h|dense_4h_to_h)\.weight$")


def build_gpt2(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """GPT-2, `c_attn` the three matrices side by side, in×out; UnsupportedInput: another activation, norm order."""
    _require_gelu(run, "GPT-2")
    renamed = algebra.renamed(tensors, GPT2, run.source)
    embedding = require_embedding(run, renamed.get("transformer.wte.weight"))
    positions = renamed.get("transformer.wpe.weight")
    check_embedding_sizes(run, embedding)
    hidden = embedding.shape[1]
    heads = run.count("num_heads")
    inner = run.count("expand_ratio", default=4) * hidden
    with algebra.fitting(f"the three parts of an attention in `{run.source}` cannot be joined"):
        joined = algebra.fuse(
            renamed,
            [f"attn.{part}" for part in DENSE],
            "attn.c_attn",
            lambda parts: (
                algebra.concat(parts, 0) if len(parts[0].shape) == 1 else transposed(algebra.concat(parts, 0))
            ),
            counts=(1, 1, 1),
        )
    config = {
        "model_type": "gpt2",
        "vocab_size": embedding.num_rows,
        "n_positions": positions.num_rows if positions else 0,
        "n_embd": hidden,
        "n_layer": run.layers("num_layers"),
        "n_head": heads,
        "n_inner": inner,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **run.tokens(bos_token_id=50256, eos_token_id=50256),
    }
    return _finish(run, joined, config, hidden, heads)


def build_bloom(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """BLOOM; its `query_key_value` alternates the heads of the three matrices. Errors as in `build_gpt2`."""
    _require_gelu(run, "BLOOM")
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    renamed = algebra.renamed(plain, BLOOM, run.source)
    embedding = require_embedding(run, renamed.get("transformer.word_embeddings.weight"))
    check_embedding_sizes(run, embedding)
    hidden = embedding.shape[1]
    heads = run.count("num_heads", default=8)
    inner = run.count("expand_ratio", default=4) * hidden
    counts = [max(1, hidden // heads)] * 3
    with algebra.fitting(f"the three parts of an attention in `{run.source}` cannot be joined"):
        names, whole = [f"self_attention.{part}" for part in DENSE], "self_attention.query_key_value"
        joined = algebra.fuse(renamed, names, whole, lambda parts: algebra.interleave_rows(parts, counts))
    flipped = {
        name: transposed(tensor) if BLOOM_IN_OUT.search(name) and len(tensor.shape) == 2 else tensor
        for name, tensor in joined.items()
    }
    config = {
        "model_type": "bloom",
        "vocab_size": embedding.num_rows,
        "hidden_size": hidden,
        "n_layer": run.layers("num_layers", default=2),
        "n_head": heads,
        "layer_norm_epsilon": 1e-5,
        **run.tokens(bos_token_id=1, eos_token_id=2, pad_token_id=3),
    }
    if inner != 4 * hidden:
        raise refuse_model(run, f"a BLOOM with `expand_ratio` {inner // hidden}", "it always expands four times")
    return _finish(run, flipped, config, hidden, heads)


def store_gpt2(settings: ModelSettings, tensors: dict[str, LazyTensor], source: str) -> MindFormersModel:
    """GPT-2 with its `c_attn` split into three matrices, [out, in]; UnsupportedInput if MindFormers lacks a setting."""
    held = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    refuse_settings(source, settings, held, "MindFormers")
    parts = _apart(
        tensors,
        "c_attn",
        lambda w: [transposed(part) for part in algebra.split(w, 1, 3)],
        lambda bias: algebra.split(bias, 0, 3),
    )
    length = settings["max_position_embeddings"]
    fields = _fields(settings, source) | {"type": "GPT2Config", "max_position_embeddings": length, "seq_length": length}
    return MindFormersModel(algebra.renamed(parts, algebra.inverted(GPT2), source), "GPT2LMHeadModel", fields)


def store_bloom(settings: ModelSettings, tensors: dict[str, LazyTensor], source: str) -> MindFormersModel:
    """BLOOM with the heads of its `query_key_value` sorted into three matrices; errors as in `store_gpt2`."""
    held = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "apply_residual_connection_post_layernorm": False}
    refuse_settings(source, settings, held, "MindFormers")
    fields = _fields(settings, source) | {"type": "BloomConfig", "seq_length": BLOOM_LENGTH}
    counts = [fields["hidden_size"] // fields["num_heads"]] * 3
    parts = _apart(tensors, "query_key_value", *[lambda whole: algebra.deal_rows(whole, counts)] * 2)
    flipped = {name: transposed(part) if BLOOM_IN_OUT.search(name) else part for name, part in parts.items()}
    return MindFormersModel(algebra.renamed(flipped, algebra.inverted(BLOOM), source), "BloomLMHeadModel", fields)


SplitFunction = Callable[[LazyTensor], Sequence[LazyTensor]]


def _apart(
    tensors: dict[str, LazyTensor], module: str, weights: SplitFunction, biases: SplitFunction
) -> dict[str, LazyTensor]:
    """Splits `module` of each layer into `dense1`, `dense2`, `dense3`."""
    parts: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        root, _, kind = name.rpartition(f".{module}.")
        if not root:
            parts[name] = tensor
            continue
        pieces = (weights if kind == "weight" else biases)(tensor)
        parts |= {f"{root}.{part}.{kind}": piece for part, piece in zip(DENSE, pieces, strict=True)}
    return parts


def _fields(settings: ModelSettings, source: str) -> dict[str, Any]:
    """Fields of both models; InputRefused: sizes, UnsupportedInput: an MLP that is no multiple of the hidden size."""
    names = {"vocab_size": "vocab_size", "hidden_size": "hidden_size"}
    names |= {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    run = RunConfig(settings, source)
    fields = {ours: run.count(theirs) for ours, theirs in names.items()}
    inner = run.count("intermediate_size", default=4 * fields["hidden_size"])
    if inner % fields["hidden_size"]:
        refuse(source, {"intermediate_size": inner}, "MindFormers")
    return fields | {"expand_ratio": inner // fields["hidden_size"]}


def _require_gelu(run: RunConfig, what: str) -> None:
    activation = run.values.get("hidden_act") or "gelu"
    if activation != "gelu" or run.flag("post_layernorm_residual"):
        raise refuse_model(
            run,
            f"a {what} with `hidden_act` {short(activation)} or post-norms",
            "it has the tanh GELU and pre-norms",
        )


def _finish(
    run: RunConfig, tensors: dict[str, LazyTensor], config: dict[str, Any], hidden: int, heads: int
) -> ConvertedModel:
    """As `finish`, with a tied head: the head of both is the embedding (`GPTHead`, `BloomHead`)."""
    if hidden % heads:
        raise MalformedInput(
            f"the hidden size {hidden} of `{run.source}` is not a multiple of its {heads} heads",
            hint="the configuration belongs to another model",
        )
    return finish(replace(run, values={**run.values, "tie_word_embeddings": True}), tensors, config)
