"""`config.json` from a LitGPT configuration, and the comparison with a `config.json` next to the weights.

Source: litgpt `model.py` (`build_rope_cache` for the rotary formulas) against transformers' modeling files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from llmconv.convert.formats.litgpt.families import GELU, SAME_FUNCTION, refused
from llmconv.convert.formats.litgpt.read_config import LitConfig
from llmconv.errors import MalformedInput

LLAMA_3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
COMPARED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "intermediate_size",
    "head_dim",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "num_local_experts",
)


def to_config(lit: LitConfig, family: str, source: str) -> dict[str, Any]:
    """The content of `config.json`, without token ids.

    Args:
        lit: LitGPT's configuration.
        family: the `model_type`, from `family_of`.
        source: name of the checkpoint, for error messages.

    Raises:
        UnsupportedInput: transformers does not have the rotary formula.
    """
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": lit.padded_vocab_size,
        "hidden_size": lit.n_embd,
        "num_hidden_layers": lit.n_layer,
        "num_attention_heads": lit.n_head,
        "max_position_embeddings": lit.block_size,
        "rope_theta": float(lit.rope_base),
        **({"rope_scaling": scaling} if (scaling := _rope_scaling(lit, source)) else {}),
    }
    if family == "falcon":
        return config | _falcon(lit)
    config["intermediate_size"] = lit.intermediate_size
    if family in ("gpt_neox", "phi"):
        return config | _neox_or_phi(lit, family)
    window = {"sliding_window": lit.sliding_window_size}
    config |= {
        "num_key_value_heads": lit.n_query_groups,
        "head_dim": lit.head_size,
        "rms_norm_eps": lit.norm_eps,
        **(window if family in ("mistral", "mixtral", "gemma2") else {}),
    }
    if family == "mixtral":
        inner = lit.moe_intermediate_size or lit.intermediate_size
        experts = {"num_local_experts": lit.n_expert, "num_experts_per_tok": lit.n_expert_per_token}
        return config | experts | {"intermediate_size": inner, "hidden_act": "silu"}
    if family.startswith("gemma"):
        return config | _gemma_config(lit, family)
    biases = {"attention_bias": False, "mlp_bias": False} if family == "llama" else {}
    return config | biases | {"hidden_act": "silu"}


def _falcon(lit: LitConfig) -> dict[str, Any]:
    return {
        "layer_norm_epsilon": lit.norm_eps,
        "ffn_hidden_size": lit.intermediate_size,
        "num_kv_heads": lit.n_query_groups,
        "new_decoder_architecture": not lit.shared_attention_norm,
        "multi_query": lit.n_query_groups == 1,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "activation": "gelu",
    }


def _neox_or_phi(lit: LitConfig, family: str) -> dict[str, Any]:
    shared = {"layer_norm_eps": lit.norm_eps, "hidden_act": GELU[lit.gelu_approximate]}
    if family == "gpt_neox":
        rotary = {"rotary_pct": lit.rotary_percentage, "rotary_emb_base": float(lit.rope_base)}
        return {**shared, **rotary, "use_parallel_residual": lit.parallel_residual, "attention_bias": True}
    if lit.gelu_approximate == "tanh":
        shared["hidden_act"] = "gelu_new"
    return {
        **shared,
        "num_key_value_heads": lit.n_query_groups,
        "partial_rotary_factor": lit.rotary_percentage,
        "qk_layernorm": False,
    }


def _gemma_config(lit: LitConfig, family: str) -> dict[str, Any]:
    config: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    if family == "gemma2":
        config |= {
            "query_pre_attn_scalar": lit.attention_scores_scalar or lit.head_size,
            "attn_logit_softcapping": lit.attention_logit_softcapping,
            "final_logit_softcapping": lit.final_logit_softcapping,
        }
    return config


def _rope_scaling(lit: LitConfig, source: str) -> dict[str, Any] | None:
    """transformers' `rope_scaling`: Llama 3.1's formula, or positions divided by a number."""
    adjust = lit.rope_adjustments
    if adjust is None:
        ratio = lit.rope_condense_ratio
        return None if ratio == 1 else {"rope_type": "linear", "factor": float(ratio)}
    numbers = {name: adjust.get(name) for name in LLAMA_3}
    is_llama_3 = set(adjust) == set(LLAMA_3) and all(map(_is_number, numbers.values()))
    is_linear = set(adjust) == {"factor"} and _is_number(adjust["factor"])
    if lit.rope_condense_ratio != 1 or not (is_llama_3 or is_linear):
        raise refused(source, lit, f"a model with `rope_adjustments` {str(adjust)[:80]}")
    if not is_llama_3:
        return {"rope_type": "linear", "factor": float(adjust["factor"])}
    positions = {"original_max_position_embeddings": adjust["original_max_seq_len"]}
    return {"rope_type": "llama3", **{name: float(adjust[name]) for name in LLAMA_3[:3]}, **positions}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def reconcile(stored: Mapping[str, Any], computed: dict[str, Any], source: str) -> dict[str, Any]:
    """The `config.json` next to the weights, with LitGPT's vocabulary, if it agrees with `model_config.yaml`.

    Args:
        stored: the content of `config.json`; empty if there is none.
        computed: from `to_config`; returned if there is no `config.json`.
        source: name of the checkpoint, for error messages.

    Raises:
        MalformedInput: they contradict each other.
    """
    if not stored:
        return computed
    kind = stored.get("model_type")
    rope = stored.get("rope_parameters")
    flat = {**stored, **(rope if isinstance(rope, dict) else {})}
    known = SAME_FUNCTION.get(computed["model_type"], (computed["model_type"],))
    different = [name for name in COMPARED if name in computed and flat.get(name) not in (None, computed[name])]
    if kind is not None and kind not in known:
        different.insert(0, "model_type")
    if different:
        name = different[0]
        raise MalformedInput(
            f"`config.json` next to `{source}` declares `{name}` {str(flat.get(name))[:40]}, but `model_config.yaml` "
            f"{computed.get(name)}",
            hint="one of the two belongs to another model; remove the wrong one",
        )
    return {**computed, **stored, "vocab_size": computed["vocab_size"]}
