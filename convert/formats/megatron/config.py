"""`config.json` from the arguments of a Megatron run.

Formulas: Megatron core `models/common/embeddings/rotary_pos_embedding.py`, `transformer/{mlp,attention}.py`,
`transformer/moe/moe_utils.py` (`topk_routing_with_score_function`) against transformers' modeling files.
"""

from __future__ import annotations

from typing import Any

from llmconv.convert.algebra.operations import HEAD_LIMIT
from llmconv.convert.formats.megatron.arguments import Arguments
from llmconv.convert.formats.megatron.families import Family, window_of
from llmconv.errors import MalformedInput

LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of `RotaryEmbedding._apply_scaling`."""

OWN_FACTOR, MEGATRON_FACTOR = "model_rope_scaling_factor", 8.0
"""The factor of NeMo and Megatron Bridge; Megatron-LM (`gpt_builders.py`) ignores its argument, and takes 8."""

INTERPOLATION = "model_interpolation_factor"
"""The number that NeMo and Megatron Bridge divide positions by."""

BALANCED = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""Losses that balance the load of experts; `sinkhorn` is none: it weights experts without normalizing."""

LAYER_LIMIT = 4096
EPSILONS = ("layernorm_epsilon", "norm_epsilon")
"""Names of the argument: until core 0.4 and since 0.16, and in between."""


def to_config(arguments: Arguments, family: Family) -> dict[str, Any]:
    """The content of `config.json`, without the size of the vocabulary and the ids of tokens.

    Args:
        arguments: of the run.
        family: from `family_of`.

    Raises:
        UnsupportedInput: a value that the family does not have.
        MalformedInput: an argument is missing or has the wrong type.
    """
    if family.model_type == "gpt2":
        return _gpt2(arguments)
    heads = arguments.count("num_attention_heads")
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "hidden_size": arguments.count("hidden_size"),
        "intermediate_size": arguments.count("ffn_hidden_size"),
        "num_hidden_layers": arguments.count("num_layers"),
        "num_attention_heads": heads,
        "max_position_embeddings": _positions(arguments),
        "rope_theta": float(arguments.number("rotary_base", 10000)),
        "tie_word_embeddings": is_tied(arguments),
        **_rope_scaling(arguments),
    }
    if family.model_type == "gpt_neox":
        return config | _neox(arguments)
    if rotary_percent(arguments) != 1:
        raise arguments.unsupported("rotary_percent")
    config |= {
        "num_key_value_heads": query_groups(arguments),
        "head_dim": head_dim(arguments),
        "rms_norm_eps": epsilon(arguments),
        "hidden_act": "silu",
    }
    if family.window:
        config["sliding_window"] = window_of(arguments)
    if family.model_type in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = family.bias
    if family.model_type == "llama":
        config["mlp_bias"] = family.bias
    return config | (_experts(arguments, family) if family.experts else {})


def _gpt2(arguments: Arguments) -> dict[str, Any]:
    width, heads = arguments.count("hidden_size"), arguments.count("num_attention_heads")
    _refuse_groups(arguments)
    if head_dim(arguments) * heads != width:
        raise arguments.unsupported("kv_channels")
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_inner": arguments.count("ffn_hidden_size", 4 * width),
        "n_layer": arguments.count("num_layers"),
        "n_head": heads,
        "n_positions": arguments.count("max_position_embeddings"),
        "layer_norm_epsilon": epsilon(arguments),
        "activation_function": {"tanh": "gelu_new", "none": "gelu"}[gelu(arguments)],
        "tie_word_embeddings": is_tied(arguments),
    }


def _neox(arguments: Arguments) -> dict[str, Any]:
    _refuse_groups(arguments)
    if head_dim(arguments) * arguments.count("num_attention_heads") != arguments.count("hidden_size"):
        raise arguments.unsupported("kv_channels")
    base = float(arguments.number("rotary_base", 10000))
    return {
        "rotary_pct": rotary_percent(arguments),
        "rotary_emb_base": base,
        "layer_norm_eps": epsilon(arguments),
        "hidden_act": {"tanh": "gelu_pytorch_tanh", "none": "gelu"}[gelu(arguments)],
        "use_parallel_residual": False,
        "attention_bias": True,
    }


def _experts(arguments: Arguments, family: Family) -> dict[str, Any]:
    """Fields of a mixture of experts; Megatron normalizes the chosen weights unless it softmaxes before choosing."""
    count, inner = arguments.count("num_experts"), arguments.count("ffn_hidden_size")
    size = arguments.count("moe_ffn_hidden_size", inner)
    before = arguments.flag("moe_router_pre_softmax")
    chosen = arguments.count("moe_router_topk", 2)
    balanced = arguments.values.get("moe_router_load_balancing_type")
    if balanced is not None and not all(one in BALANCED for one in _as_list(balanced)):
        raise arguments.unsupported("moe_router_load_balancing_type")
    if family.model_type == "mixtral":
        if before:
            raise arguments.unsupported("moe_router_pre_softmax")
        if dense_layers(arguments):
            raise arguments.unsupported("moe_layer_freq")
        return {"intermediate_size": size, "num_local_experts": count, "num_experts_per_tok": chosen}
    config = {
        "moe_intermediate_size": size,
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": not before,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense_layers(arguments),
    }
    if family.shared:
        if not arguments.flag("moe_shared_expert_gate"):
            raise arguments.unsupported("moe_shared_expert_gate")
        config["shared_expert_intermediate_size"] = arguments.count("moe_shared_expert_intermediate_size")
    return config


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def dense_layers(arguments: Arguments) -> list[int]:
    """The layers without experts, by `moe_layer_freq`: every n-th layer has them, or those with a 1 in a list."""
    layers, frequency = arguments.count("num_layers"), arguments.values.get("moe_layer_freq", 1)
    if not arguments.values.get("num_experts") or frequency is None:
        return []
    if layers > LAYER_LIMIT:
        raise arguments.invalid("num_layers", layers, f"at most {LAYER_LIMIT}")
    if type(frequency) is int and frequency > 0:
        return [layer for layer in range(layers) if layer % frequency]
    if not isinstance(frequency, list) or len(frequency) != layers or any(one not in (0, 1) for one in frequency):
        raise arguments.invalid("moe_layer_freq", frequency, "a number, or one for each layer")
    return [layer for layer, has_experts in enumerate(frequency) if not has_experts]


def query_groups(arguments: Arguments) -> int:
    """The number of key/value heads."""
    heads = arguments.count("num_attention_heads")
    grouped = arguments.flag("group_query_attention", default=arguments.values.get("num_query_groups") is not None)
    groups = arguments.count("num_query_groups", heads) if grouped else heads
    if heads % groups:
        raise MalformedInput(
            f"`{arguments.source}` has {heads} heads in {groups} groups", hint="its arguments were changed"
        )
    return groups


def head_dim(arguments: Arguments) -> int:
    """Rows of one head."""
    width, heads = arguments.count("hidden_size"), arguments.count("num_attention_heads")
    dim = arguments.count("kv_channels", max(1, width // heads))
    if dim > HEAD_LIMIT:
        raise arguments.invalid("kv_channels", dim, f"at most {HEAD_LIMIT}")
    return dim


def rotary_percent(arguments: Arguments) -> float:
    """The part of each head that is rotated, at most 1.

    Raises:
        UnsupportedInput: an odd number of rows would be rotated, or none.
    """
    part = float(arguments.number("rotary_percent", 1.0))
    rows = int(head_dim(arguments) * part)
    if part > 1 or rows % 2 or not rows:
        raise arguments.unsupported("rotary_percent" if part != 1 else "kv_channels")
    return part


def epsilon(arguments: Arguments) -> float:
    """Epsilon of the norms."""
    name = next((name for name in EPSILONS if arguments.values.get(name) is not None), EPSILONS[0])
    return float(arguments.number(name, 1e-5))


def is_tied(arguments: Arguments) -> bool:
    """Whether the output head is the embedding."""
    return not arguments.flag("untie_embeddings_and_output_weights")


def gelu(arguments: Arguments) -> str:
    """The approximation of the GELU: `tanh` where it is fused with the bias (the default), else `none`.

    Raises:
        UnsupportedInput: `openai_gelu` without the fusion, which Megatron core ignores and the older model does not.
    """
    if arguments.flag("bias_gelu_fusion", default=True):
        return "tanh"
    if arguments.flag("openai_gelu"):
        raise arguments.unsupported("openai_gelu")
    return "none"


def _positions(arguments: Arguments) -> int:
    return arguments.count("max_position_embeddings", arguments.values.get("seq_length") or 2048)


def _rope_scaling(arguments: Arguments) -> dict[str, Any]:
    """Llama 3.1's formula, or positions divided by a number."""
    ratio = arguments.values.get(INTERPOLATION)
    if arguments.flag("use_rope_scaling"):
        if ratio not in (None, 1):
            raise arguments.unsupported(INTERPOLATION)
        factor = float(arguments.number(OWN_FACTOR, MEGATRON_FACTOR))
        return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **LLAMA_3}}
    if ratio is None:
        return {}
    factor = float(arguments.number(INTERPOLATION, 1))
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}


def ignored_factor(arguments: Arguments) -> list[str]:
    """A warning where Megatron-LM ignored an argument."""
    factor = arguments.values.get("rope_scaling_factor")
    if not arguments.flag("use_rope_scaling") or factor in (None, MEGATRON_FACTOR):
        return []
    return [
        f"Megatron-LM ignores `rope_scaling_factor` {str(factor)[:40]} and computes with {MEGATRON_FACTOR:g}; so does "
        "the converted model"
    ]


def _refuse_groups(arguments: Arguments) -> None:
    if query_groups(arguments) != arguments.count("num_attention_heads"):
        raise arguments.unsupported("num_query_groups")
