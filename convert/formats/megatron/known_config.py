"""The user's `config.json`: arguments for a run that has none, and the comparison with those of one that has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmconv.convert.formats.megatron.arguments import Arguments
from llmconv.convert.formats.megatron.families import FAMILIES
from llmconv.convert.models.model_config import ALIASES
from llmconv.errors import InputRefused, MalformedInput

SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "layer_norm_eps": "norm_epsilon",
    "layer_norm_epsilon": "norm_epsilon",
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "rotary_pct": "rotary_percent",
}
"""Fields of `config.json` with the value of an argument."""

EXACT_GELU = "gelu"
FREE = ("max_position_embeddings", "n_positions", "vocab_size", "model_type")
"""Fields in which the user's configuration may differ from the run's."""


def arguments_of(config: Mapping[str, Any], source: str) -> Arguments:
    """Megatron's arguments for a model of transformers, for checkpoints that have none.

    Args:
        config: the user's fields: a whole `config.json`, or Megatron's arguments themselves.
        source: name of the checkpoint, for messages.

    Raises:
        InputRefused: they are neither.
    """
    if "num_layers" in config and "model_type" not in config:
        return Arguments(source, config)
    fields = {ALIASES.get(name, name): value for name, value in config.items()}
    family = next((row for row in FAMILIES if row.model_type == fields.get("model_type")), None)
    if family is None:
        raise InputRefused(
            f"`{source}` does not contain the arguments of its run",
            hint="give the model's `config.json` with `--config`, or a YAML file with Megatron's arguments",
        )
    made = {own: fields[name] for name, own in SIZES.items() if fields.get(name) is not None}
    bias = family.bias and (family.model_type != "llama" or fields.get("mlp_bias") is True)
    rope = _rope(fields)
    window = fields.get("sliding_window")
    made |= {
        "rotary_base": rope.get("rope_theta") or fields.get("rotary_emb_base"),
        "swiglu": family.gated,
        "normalization": "RMSNorm" if family.rms else "LayerNorm",
        "position_embedding_type": "rope" if family.rope else "learned_absolute",
        "add_bias_linear": bias,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "bias_gelu_fusion": fields.get("activation_function", fields.get("hidden_act", "")) != EXACT_GELU,
        "moe_router_pre_softmax": fields.get("norm_topk_prob", True) is False,
        "moe_shared_expert_gate": family.shared,
        "untie_embeddings_and_output_weights": not fields.get("tie_word_embeddings", not family.rope),
        "window_size": (window - 1, 0) if family.window and isinstance(window, int) and window > 0 else None,
    }
    return Arguments(source, made)


def merged(computed: Mapping[str, Any], given: Mapping[str, Any], source: str, *, compared: bool) -> dict[str, Any]:
    """The configuration from the arguments, and over it the user's fields, which must not contradict it.

    Args:
        computed: from `to_config`.
        given: the user's fields.
        source: name of the checkpoint, for messages.
        compared: whether the arguments are those of the run; otherwise the user's fields decide.

    Raises:
        MalformedInput: names the first field that contradicts the arguments.
    """
    own, other = _settings(computed), _settings(given)
    for name, value in own.items() if compared else ():
        if name in other and name not in FREE and other[name] not in (None, value):
            raise MalformedInput(
                f"`--config` declares `{name}` {str(other[name])[:60]}, the arguments of `{source}` {str(value)[:60]}",
                hint="the configuration is of another model; leave the field out, the arguments contain it",
            )
    replaced = ("rope_theta", "rope_scaling") if isinstance(given.get("rope_parameters"), dict) else ()
    kept = {name: value for name, value in computed.items() if name not in replaced}
    return kept | {name: value for name, value in given.items() if value is not None or name not in kept}


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    nested = fields.get("rope_parameters")
    return {"rope_theta": fields.get("rope_theta"), **(nested if isinstance(nested, dict) else {})}


def _settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under one name each; frequencies that are not scaled are None."""
    flat = {ALIASES.get(name, name): value for name, value in fields.items()}
    scaling = flat.pop("rope_parameters", None) or flat.pop("rope_scaling", None)
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type"))
        if scaling.get("rope_theta") is not None:
            flat["rope_theta"] = scaling["rope_theta"]
        flat["rope factor"] = None if kind in (None, "default") else (kind, scaling.get("factor"))
    elif "rope_theta" in flat:
        flat["rope factor"] = None
    flat.pop("rope_scaling", None)
    return flat
