"""MindFormers' models of the Llama kind: llama 1 to 3, qwen 1 to 3, internlm 1 and 2, baichuan 1 and 2 (7B).

Source: mindformers `models/llama/{llama,llama_config,convert_reversed}.py`, `modules/layers.py` (`FreqsMgr`) and
`research/{qwen,internlm,internlm2,baichuan2}`. Weights are out×in and rotate halves, as in transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmconv.convert.algebra.operations import inverted, rename
from llmconv.convert.formats.mindformers.config import (
    CORE,
    EMBEDDING,
    HEAD,
    LLAMA,
    QWEN,
    ConvertedModel,
    Heads,
    MindFormersModel,
    RunConfig,
    check_embedding_sizes,
    finish,
    fuse,
    heads_of,
    refuse_model,
    require_embedding,
    unfuse,
)
from llmconv.convert.models.code_model import baichuan, needs_code
from llmconv.convert.models.config_file import trusted_code
from llmconv.convert.models.model_config import ModelSettings, refuse, refuse_settings
from llmconv.errors import InputRefused
from llmconv.tensors import Array, LazyTensor

BAICHUAN2_VOCABULARY = 125696
NORM_HEAD_EPS = 1e-5

SCALING = {  # ModelSettings of rotary methods, by `extend_method`
    "LLAMA3": ("factor", "low_freq_factor", "high_freq_factor"),
    "YARN": ("factor", "beta_fast", "beta_slow"),
}

ORIGINAL = "original_max_position_embeddings"
SEQ_LENGTH = 4096
"""Largest `seq_length` written by default: it sizes the buffers of a run and is not a property of the model."""

WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers")


def build_llama(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """A model in Llama's names (else MalformedInput), by biases and class; UnsupportedInput: Baichuan without code."""
    if re.search(r"Baichuan.*13B", run.arch, re.IGNORECASE) or run.flag("use_alibi"):
        reason = "the Llama of transformers has no ALiBi"
        code = needs_code(trusted_code(run.fields), run.source, f"a {run.arch or 'Llama'} with ALiBi", reason)
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
    normalized = any(".q_layernorm." in name for name in tensors)
    return _build(run, tensors, CORE, "qwen3" if normalized else "llama")


def _build(run: RunConfig, tensors: dict[str, LazyTensor], names: dict[str, str | None], kind: str) -> ConvertedModel:
    activation = run.fields.get("hidden_act") or "silu"
    if activation not in ("silu", "swiglu"):
        raise refuse_model(run, f"a Llama with `hidden_act` {str(activation)[:40]}", "its feed-forward is SwiGLU")
    embedding = require_embedding(
        run, next((tensors[name] for name, to in names.items() if to == EMBEDDING and name in tensors), None)
    )
    heads = heads_of(run, embedding.shape[1])
    parts = unfuse(run, tensors, heads)
    renamed = {target: parts[source] for target, source in rename(parts, names, run.source).items()}
    biases = {one for one in "qkvo" if f"model.layers.0.self_attn.{one}_proj.bias" in renamed}
    if biases not in (set(), set("qkv"), set("qkvo")):
        raise refuse_model(run, f"a Llama with biases on {sorted(biases)}", "its biases are on q, k, v, or on all four")
    if kind == "llama" and biases == set("qkv"):
        kind = "qwen2"
    gate = renamed.get("model.layers.0.mlp.gate_proj.weight")
    config = _config(run, embedding, gate.num_rows if gate else 0, heads, kind)
    if kind == "qwen3" and biases:
        raise refuse_model(run, f"a Qwen 3 with biases on {sorted(biases)}", "it has none")
    if kind != "qwen2":
        config |= {"attention_bias": bool(biases), "mlp_bias": False}
    return finish(run, renamed, _shapes(config, heads, biases), config, HEAD)


def _config(run: RunConfig, embedding: LazyTensor, intermediate: int, heads: Heads, kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        **check_embedding_sizes(run, embedding),
        "intermediate_size": intermediate,
        "num_hidden_layers": run.integer("num_layers", "num_hidden_layers"),
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.keys,
        "head_dim": heads.dim,
        "hidden_act": "silu",
        "max_position_embeddings": run.integer(
            "max_position_embedding", "max_position_embeddings", "seq_length", default=2048
        ),
        "rms_norm_eps": run.number("rms_norm_eps", "layernorm_epsilon", default=1e-5),
        **rope_settings(run),
        **{name: run.fields[name] for name in WINDOW if name in run.fields and run.flag("use_sliding_window")},
        **run.tokens(bos_token_id=1, eos_token_id=2),
    }


def rope_settings(run: RunConfig, usual: float | None = 10000.0) -> dict[str, Any]:
    """`rope_theta` (default `usual`) and `rope_scaling` (`FreqsMgr`); UnsupportedInput for another formula."""
    method = str(run.fields.get("extend_method") or "None").upper()
    factor = run.fields.get("scaling_factor", 1.0)
    ready = run.fields.get("rope_parameters") or run.fields.get("rope_scaling")
    if isinstance(ready, dict):  # a configuration in transformers' fields
        fields = RunConfig(run.source, {**run.fields, **ready}, "", {})
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
        numbers = RunConfig(run.source, factor, "", {})
        old = {ORIGINAL: numbers.integer(ORIGINAL)}
        found: dict[str, Any] = {name: numbers.number(name) for name in SCALING[method]}
        found = {"rope_type": method.lower(), **found, **old}
        if method == "YARN":  # FreqsMgr scales the rotary table by this quotient
            whole, part = (_mscale(found["factor"], numbers.number(name)) for name in ("mscale", "mscale_all_dim"))
            found["attention_factor"] = whole / part
        return {"rope_theta": theta, "rope_scaling": found}
    raise refuse_model(run, f"a model with `extend_method` {method[:40]}", "its rotary formula differs")


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


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
    return MindFormersModel(_renamed(tensors, LLAMA, source), f"{kind}ForCausalLM", fields)


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
    parts = fuse(
        _renamed(tensors, CORE, source), QKV, "linear_qkv", (group, settings["head_dim"], settings["head_dim"])
    )
    same = ("rope_scaling", "rope_theta", "tie_word_embeddings", "max_position_embeddings", "rms_norm_eps")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names = (*sizes, "num_key_value_heads", "head_dim", *same)
    fields = {"type": "Qwen3Config", **{name: settings[name] for name in names if settings[name] is not None}}
    return MindFormersModel(fuse(parts, GATE_UP, "linear_fc1", (1, 1)), "Qwen3ForCausalLM", fields)


def _renamed(tensors: dict[str, LazyTensor], names: Mapping[str, str | None], source: str) -> dict[str, LazyTensor]:
    return {target: tensors[name] for target, name in rename(tensors, inverted(names), source).items()}


def _shapes(config: dict[str, Any], heads: Heads, biases: set[str]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    rows = {"q": heads.queries * heads.dim, "k": heads.keys * heads.dim, "v": heads.keys * heads.dim, "o": hidden}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, hidden)}
    for layer in (f"model.layers.{number}" for number in range(config["num_hidden_layers"])):
        for one, count in rows.items():
            shapes[f"{layer}.self_attn.{one}_proj.weight"] = (count, rows["q"] if one == "o" else hidden)
            if one in biases:
                shapes[f"{layer}.self_attn.{one}_proj.bias"] = (count,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}.self_attn.{one}_norm.weight": (heads.dim,) for one in "qk"}
        shapes |= {
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), HEAD: (vocabulary, hidden)}


def _baichuan2(run: RunConfig, tensors: dict[str, LazyTensor], vocabulary: int) -> dict[str, LazyTensor]:
    """Normalizes the head of Baichuan 2, as its `NormHead`; InputRefused if it is unknown whether it is one."""
    if vocabulary == BAICHUAN2_VOCABULARY and not run.arch:
        raise InputRefused(
            f"`{run.source}` has the vocabulary of Baichuan 2, whose head is normalized, but its class is unknown",
            hint="give the YAML file of the run, with `model.arch.type`",
        )
    if not re.match(r"Baichuan.*V2", run.arch, re.IGNORECASE) or HEAD not in tensors:
        return tensors
    return {**tensors, HEAD: _normalized(tensors[HEAD])}


def _normalized(head: LazyTensor) -> LazyTensor:
    """Divides each row by √(Σw² + 1e-5), as `NormHead` does; rounded once."""

    def load(start: int, stop: int) -> Array:
        rows = head.rows(start, stop).astype(np.float64)
        normalized: Array = (rows / np.sqrt((rows**2).sum(1, keepdims=True) + NORM_HEAD_EPS)).astype(head.dtype.numpy)
        return normalized

    return LazyTensor(head.dtype, head.shape, load)
