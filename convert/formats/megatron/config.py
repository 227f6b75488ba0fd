"""The arguments of a Megatron run, checked one by one, and the family of transformers and `config.json` they describe.

They have the names of Megatron-LM's command line, whatever container they are in. Tables list arguments with one
allowed value and those without an effect on the model; any other that is set and whose name looks like part of a model
is refused. Source: NVIDIA/Megatron-LM 2.5 to core 0.19, `megatron/training/arguments.py`,
`core/transformer/transformer_config.py`.

Formulas: Megatron core `models/common/embeddings/rotary_pos_embedding.py`, `transformer/{mlp,attention}.py`,
`transformer/moe/moe_utils.py` (`topk_routing_with_score_function`) against transformers' modeling files. A family is
one row of what its model has, in Megatron's terms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any

from llmconv.convert.algebra import HEAD_LIMIT
from llmconv.convert.formats.megatron.experts import (
    LAYER_LIMIT,
    Arguments,
    grouped_experts,
    has_sigmoid,
    softmax_experts,
)
from llmconv.convert.models.config_file import updated
from llmconv.convert.models.model_config import ALIASES
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing, short

CAPACITY = "moe_expert_capacity_factor"


def check_arguments(arguments: Arguments, *, described: bool, old: bool) -> list[str]:
    """Refuses (UnsupportedInput) arguments that give a model which no supported family has; returns warnings.

    With `described` the user gives the model's `config.json`, so unknown arguments are only reported; `old` is a model
    of before Megatron core.
    """
    latent, sigmoid = arguments.flag("multi_latent_attention"), has_sigmoid(arguments)
    read = (LATENT if latent else ()) + (SIGMOID if sigmoid else ()) + (GROUPED if latent or sigmoid else ())
    for name, allowed in (NEUTRAL | (OLD_MODEL if old else {})).items():
        if name not in read and not _is_one_of(arguments.values.get(name), allowed):
            raise arguments.unsupported(name)
    known = NEUTRAL.keys() | IGNORED
    unknown = [
        name
        for name, value in arguments.values.items()
        if SENSITIVE.search(name)
        and not (name in known or IGNORED_PREFIXES.fullmatch(name))
        and not _is_one_of(value, OFF)
    ]
    if unknown and not described:
        raise UnsupportedInput(
            f"`{arguments.source}` was trained with unknown arguments that may change the model: {listing(unknown)}",
            hint="if they do not change it, give the model's whole `config.json` with `--config`",
        )
    warnings = [f"ignored unknown arguments: {listing(unknown)}"] if unknown else []
    if not _is_one_of(arguments.values.get(CAPACITY), OFF):
        warnings.append(f"`{CAPACITY}` drops tokens of full experts in Megatron; the converted model drops none")
    return warnings


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether an argument is missing or has one of these values; True is not 1."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


OFF: tuple[Any, ...] = (None, False, 0, "", [], (), {}, "none")  # values of an argument that is not set
_OFF_WORDS = """
    activation_func_clamp_value add_decoder attention_output_gate apply_residual_connection_post_layernorm
    decoder_num_layers enable_hyper_connections experimental_attention_variant glu_linear_offset
    heterogeneous_block_specs heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path
    hybrid_attention_ratio hybrid_layer_pattern hybrid_mlp_ratio hybrid_override_pattern is_hybrid_model
    linear_attention_freq moe_apply_probs_on_input moe_extended_tp moe_latent_size moe_mlp_glu_interleave_size
    moe_router_enable_expert_bias moe_router_force_biased moe_router_force_load_balancing moe_router_group_topk
    moe_router_num_groups moe_router_topk_limited_devices moe_shared_expert_glu_interleave_size mrope_section
    multi_latent_attention no_rope_freq num_tokentypes qk_l2_norm quick_geglu retro_add_retriever softmax_scale
    spec squared_relu use_mup window_attn_skip_freq
"""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF_WORDS.split(), OFF),
    "moe_router_score_function": ("softmax", *OFF),
    "moe_router_topk_scaling_factor": (1, *OFF),
    "rope_type": ("rope", *OFF),
    "rotary_scaling_factor": (1, *OFF),
    "rotary_seq_len_interpolation_factor": (1, *OFF),
    "softmax_type": ("vanilla", *OFF),
}
"""Arguments that change the model, and the values with which they do not.

`rotary_seq_len_interpolation_factor` is here since Megatron-LM's own models ignore it from core 0.6 to 0.18 only.
"""

# Those of `NEUTRAL` that families read with latent attention, with a router of sigmoids, and with either
LATENT = ("multi_latent_attention", "rope_type", "rotary_scaling_factor")
SIGMOID = ("moe_router_enable_expert_bias", "moe_router_score_function")
GROUPED = ("moe_router_group_topk", "moe_router_num_groups", "moe_router_topk_scaling_factor")

# Arguments that the model of before Megatron core ignores, and the values with which that makes no difference
OLD_MODEL: dict[str, tuple[Any, ...]] = {"rotary_base": (None, 10000), "rotary_interleaved": OFF}
_IGNORED_WORDS = """
    account_for_embedding_in_pipeline_split activation_func activation_func_fp8_input_store
    activation_offload_fraction add_position_embedding apply_layernorm_1p apply_rope_fusion
    apply_wd_to_qk_layernorm attention_backend attention_dropout attention_softmax_in_fp32
    bias_activation_fusion bias_swiglu_fusion cache_mla_latents checkpoint_activations
    clone_scatter_output_in_embedding cpu_offloading_activations create_attention_mask_in_dataloader
    defer_embedding_wgrad_compute distribute_checkpointed_activations distribute_saved_activations
    embedding_init_method embedding_init_method_std embedding_path embedding_weights_in_fp32
    ep_overlap_early_attn_memory_release expert_gtp_weight_remat_size expert_model_parallel_size
    expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size fine_grained_activation_offloading
    flash_attention_version fp32_residual_connection fp8_dot_product_attention fp8_hybrid
    fp8_multi_head_attention fused_residual_rmsnorm fused_single_qkv_rope gated_linear_unit
    group_query_attention gtp_expert_remat_nccl_ub hybrid_context_parallel kitchen_attention_backend
    layernorm_epsilon layernorm_zero_centered_gamma log_l2_norm_grad_to_tensorboard log_max_attention_logit
    log_params_norm logit_dtype loss_scale_window masked_softmax_fusion max_position_embeddings
    memory_efficient_layer_norm model_rope_scaling_factor moe_aux_loss_coeff moe_enable_deepep
    moe_enable_routing_replay moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_ffn_hidden_size
    moe_grad_scale_func moe_grouped_gemm moe_input_jitter_eps moe_layer_freq moe_layer_recompute
    moe_per_layer_logging moe_permute_fusion moe_router_bias_update_rate moe_router_dtype moe_router_fusion
    moe_router_load_balancing_type moe_router_pre_softmax moe_router_topk moe_shared_expert_gate
    moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_single_grouped_bias
    moe_single_grouped_weight moe_upcycling_granularity moe_use_grouped_tensor moe_use_legacy_grouped_gemm
    moe_use_upcycling moe_z_loss_coeff norm_epsilon normalization num_attention_heads num_experts
    num_microbatches_with_partial_activation_checkpoints num_moe_experts original_max_position_embeddings
    output_bert_embeddings output_logit_dtype overlap_dispatch_backward_with_experts_wgrad
    overlap_moe_expert_parallel_comm persist_layer_norm position_embedding_type qk_layernorm
    recompute_activations reset_attention_mask reset_position_ids rope_scaling_factor rotary_base
    rotary_interleaved rotary_percent model_interpolation_factor save_activations_interval
    save_tokens_per_expert_interval standalone_embedding_stage swiglu throughput_window_size
    untie_embeddings_and_output_weights use_flash_attn use_grouped_gemm_for_shared_expert use_kitchen_attention
    use_mamba_mem_eff_path use_rope_scaling use_rotary_position_embeddings use_te_activation_func window_size
"""
# Arguments that are read by `families`, and those that concern speed, memory, precision or training
IGNORED = frozenset(_IGNORED_WORDS.split())
# Groups of arguments with defaults other than off, which have an effect only with one of `NEUTRAL`, or none
IGNORED_PREFIXES = re.compile(
    r"(?:no_|dino_|dsa_|inference_|kv_|linear_|log_|logits_|mamba_|mhc_|mtp_|mscale|mup_|q_lora|qk_clip|qk_head_dim|"
    r"qk_pos_emb_head_dim|relative_attention_|retriever_|retro_|rl_|yarn_|experimental_attention_variant_loss|"
    r"moe_(?:combine|deepep|dispatch|flex|hybridep|ncclep|pad_|paged|permute|router_padding|router_quantile|"
    r"routing_trace|token_))\w*"
)
SENSITIVE = re.compile(  # parts of names that suggest that an argument changes the model
    r"attention|attn|rope|rotary|(?<!de)norm(?!al)|moe_|expert|glu|residual|softmax|window|position|logit|qk_|embedding|"
    r"mamba|hybrid|_mla|linear_|activation|latent|tokentype|hyper_conn|mtp"
)


# Constants of `RotaryEmbedding._apply_scaling`
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# The factor of NeMo and Megatron Bridge; Megatron-LM (`gpt_builders.py`) ignores its argument, and takes 8
OWN_FACTOR, MEGATRON_FACTOR = "model_rope_scaling_factor", 8.0
INTERPOLATION = "model_interpolation_factor"  # the number that NeMo and Megatron Bridge divide positions by
EPSILONS = ("layernorm_epsilon", "norm_epsilon")  # names of the argument: until core 0.4 and since 0.16, and in between


# Layers of the last and of the first pipeline stage, in Megatron-LM's names and in those of its core
STAGE_LAYERS = (
    *("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
    *("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
)


def with_layers_of_stage(arguments: Arguments) -> tuple[Arguments, list[str]]:
    """The arguments with the layers that a run of one stage has, and a warning if those are not `num_layers`.

    Megatron core builds as many as the last stage is given, else the first, also if it is the only one
    (`transformer/transformer_block.py`, `get_num_layers_to_build`).
    """
    name = next((one for one in STAGE_LAYERS if arguments.get(one) is not None), None)
    if name is None or arguments.get("pipeline_model_parallel_size", default=1) != 1:
        return arguments, []
    count, stated = arguments.count(name), arguments.get("num_layers")
    warning = f"the run had {count} layers, not `num_layers` {short(stated, 20)}: its only stage was given `{name}`"
    own = replace(arguments, values={**arguments.values, "num_layers": count})
    return own, [] if count == stated else [warning]


def to_config(arguments: Arguments, family: Family) -> dict[str, Any]:
    """`config.json` without vocabulary and ids; UnsupportedInput: no such family, MalformedInput: invalid values."""
    width, heads = arguments.count("hidden_size"), arguments.count("num_attention_heads")
    if not family.rms and (query_groups(arguments) != heads or head_dim(arguments) * heads != width):
        raise arguments.unsupported("num_query_groups" if query_groups(arguments) != heads else "kv_channels")
    if family.model_type == "gpt2":
        return {
            "model_type": "gpt2",
            "n_embd": width,
            "n_inner": arguments.count("ffn_hidden_size", default=4 * width),
            "n_layer": arguments.count("num_layers"),
            "n_head": heads,
            "n_positions": arguments.count("max_position_embeddings"),
            "layer_norm_epsilon": epsilon(arguments),
            "activation_function": {"tanh": "gelu_new", "none": "gelu"}[gelu(arguments)],
            "tie_word_embeddings": is_tied(arguments),
        }
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "hidden_size": width,
        "intermediate_size": arguments.count("ffn_hidden_size"),
        "num_hidden_layers": arguments.count("num_layers"),
        "num_attention_heads": heads,
        "max_position_embeddings": arguments.count("max_position_embeddings", "seq_length", default=2048),
        "rope_theta": arguments.number("rotary_base", default=10000),
        "tie_word_embeddings": is_tied(arguments),
        **(_latent_scaling(arguments) if family.latent else _rope_scaling(arguments)),
    }
    if family.model_type == "gpt_neox":
        return config | {
            "rotary_pct": rotary_percent(arguments),
            "rotary_emb_base": config["rope_theta"],
            "layer_norm_eps": epsilon(arguments),
            "hidden_act": {"tanh": "gelu_pytorch_tanh", "none": "gelu"}[gelu(arguments)],
            "use_parallel_residual": False,
            "attention_bias": True,
        }
    return config | {"rms_norm_eps": epsilon(arguments), "hidden_act": "silu"} | _gated(arguments, family)


def _gated(arguments: Arguments, family: Family) -> dict[str, Any]:
    """The fields of attention and feed-forward in families with RMSNorm."""
    config: dict[str, Any] = {}
    if family.model_type == "glm4_moe":
        config["partial_rotary_factor"] = rotary_percent(arguments)
    elif rotary_percent(arguments) != 1:
        raise arguments.unsupported("rotary_percent")
    if family.latent:
        return _latent(arguments) | grouped_experts(arguments)
    config |= {"num_key_value_heads": query_groups(arguments), "head_dim": head_dim(arguments)}
    if family.sigmoid:
        own = {"attention_bias": arguments.flag("add_qkv_bias"), "use_qk_norm": arguments.flag("qk_layernorm")}
        return config | own | grouped_experts(arguments)
    if family.window:
        config["sliding_window"] = window_of(arguments)
    if family.model_type in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = family.bias
    if family.model_type == "llama":
        config["mlp_bias"] = family.bias
    return config | (softmax_experts(arguments, family.model_type, shared=family.shared) if family.experts else {})


def _latent(arguments: Arguments) -> dict[str, Any]:
    """Sizes of latent attention (MLA)."""
    if arguments.flag("rotary_interleaved"):
        raise arguments.unsupported("rotary_interleaved")
    rank = arguments.values.get("q_lora_rank")
    return {
        "num_key_value_heads": arguments.count("num_attention_heads"),
        "attention_bias": False,
        "q_lora_rank": None if rank is None else arguments.count("q_lora_rank"),
        "kv_lora_rank": arguments.count("kv_lora_rank"),
        "qk_nope_head_dim": arguments.count("qk_head_dim"),
        "qk_rope_head_dim": arguments.count("qk_pos_emb_head_dim"),
        "v_head_dim": arguments.count("v_head_dim"),
    }


def latent_rows(arguments: Arguments) -> dict[str, int]:
    """The rows of the first matrices of latent attention, by name; releases differ in whether ranks divide them."""
    if not arguments.flag("multi_latent_attention"):
        return {}
    rows = {"linear_kv_down_proj": arguments.count("kv_lora_rank") + arguments.count("qk_pos_emb_head_dim")}
    if arguments.values.get("q_lora_rank") is not None:
        rows["linear_q_down_proj"] = arguments.count("q_lora_rank")
    return rows


def _latent_scaling(arguments: Arguments) -> dict[str, Any]:
    """YaRN of latent attention, whose default it is (Megatron core `transformer/multi_latent_attention.py`).

    Before core 0.14, whose arguments have no `rope_type`, the trained length was `max_position_embeddings`, now 4096,
    and the scores were scaled by `mscale`, now by `mscale_all_dim`.
    """
    factor, kind = arguments.number("rotary_scaling_factor", default=1), arguments.word("rope_type", "yarn")
    if kind not in ("rope", "yarn"):
        raise arguments.unsupported("rope_type")
    if kind == "rope" or factor == 1:
        return {}
    own, length = "original_max_position_embeddings", 4096
    scale, all_scale = (arguments.number(name, least=-1) for name in ("mscale", "mscale_all_dim"))
    if not ("rope_type" in arguments.values or own in arguments.values):
        length = arguments.count("max_position_embeddings")
        if scale != all_scale:
            raise arguments.unsupported("mscale")
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        own: arguments.count(own, default=length),
        "beta_fast": arguments.number("beta_fast", default=32),
        "beta_slow": arguments.number("beta_slow", default=1),
        "mscale": scale,
        "mscale_all_dim": all_scale,
    }
    if not (scale and all_scale):  # transformers would take an `mscale` of 1
        yarn["attention_factor"] = (0.1 * scale * log(factor) + 1) / (0.1 * all_scale * log(factor) + 1)
    return {"rope_scaling": yarn}


def query_groups(arguments: Arguments) -> int:
    heads = arguments.count("num_attention_heads")
    grouped = arguments.flag("group_query_attention", default=arguments.values.get("num_query_groups") is not None)
    groups = arguments.count("num_query_groups", default=heads) if grouped else heads
    if heads % groups:
        raise MalformedInput(
            f"`{arguments.source}` has {heads} heads in {groups} groups", hint="its arguments were changed"
        )
    return groups


def head_dim(arguments: Arguments) -> int:
    width, heads = arguments.count("hidden_size"), arguments.count("num_attention_heads")
    dim = arguments.count("kv_channels", default=max(1, width // heads))
    if dim > HEAD_LIMIT:
        raise arguments.invalid("kv_channels", dim, f"at most {HEAD_LIMIT}")
    return dim


def rotary_percent(arguments: Arguments) -> float:
    """The part of each head that is rotated, at most 1; UnsupportedInput if an odd number of rows or none would be."""
    part = arguments.number("rotary_percent", default=1.0)
    rows = int(head_dim(arguments) * part)
    if part > 1 or rows % 2 or not rows:
        raise arguments.unsupported("rotary_percent" if part != 1 else "kv_channels")
    return part


def epsilon(arguments: Arguments) -> float:
    name = next((name for name in EPSILONS if arguments.values.get(name) is not None), EPSILONS[0])
    return arguments.number(name, default=1e-5)


def is_tied(arguments: Arguments) -> bool:
    return not arguments.flag("untie_embeddings_and_output_weights")


def gelu(arguments: Arguments) -> str:
    """`tanh` if fused with the bias (default), else `none`; UnsupportedInput for `openai_gelu` without fusion."""
    if arguments.flag("bias_gelu_fusion", default=True):
        return "tanh"
    if arguments.flag("openai_gelu"):
        raise arguments.unsupported("openai_gelu")
    return "none"


def _rope_scaling(arguments: Arguments) -> dict[str, Any]:
    """Llama 3.1's formula, or positions divided by a number."""
    ratio = arguments.values.get(INTERPOLATION)
    if arguments.flag("use_rope_scaling"):
        if ratio not in (None, 1):
            raise arguments.unsupported(INTERPOLATION)
        factor = arguments.number(OWN_FACTOR, default=MEGATRON_FACTOR)
        return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **LLAMA_3}}
    if ratio is None:
        return {}
    factor = arguments.number(INTERPOLATION, default=1)
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}


def ignored_factor(arguments: Arguments) -> list[str]:
    """A warning where Megatron-LM ignored an argument."""
    factor = arguments.values.get("rope_scaling_factor")
    if not arguments.flag("use_rope_scaling") or factor in (None, MEGATRON_FACTOR):
        return []
    return [
        f"Megatron-LM ignores `rope_scaling_factor` {short(factor)} and computes with {MEGATRON_FACTOR:g}; so does "
        "the converted model"
    ]


@dataclass(frozen=True)
class Family:
    """The parts that distinguish a model."""

    model_type: str
    rope: bool = True  # rotary positions; else a learned table
    rms: bool = True  # RMSNorm; else LayerNorm
    gated: bool = True  # the feed-forward is gated with SiLU; else it has a GELU
    bias: bool = False  # every linear layer has a bias
    qkv_bias: bool = False  # queries, keys and values have a bias
    qk_norm: bool = False  # queries and keys are normalized
    experts: bool = False  # the feed-forward is a mixture of experts
    shared: bool = False  # with one expert for all tokens, behind a gate
    window: bool = False  # attention may be limited to a window; `None`: it must not be
    latent: bool = False  # keys and values come from a latent vector (MLA)
    sigmoid: bool = False  # the router's scores are sigmoids
    mtp: bool = False  # transformers' files may have heads that predict later tokens
    either: tuple[str, ...] = ()  # parts that its models may have or not


FAMILIES = (  # in this order; the first that fits is taken unless `--config` names another
    Family("llama"),
    Family("llama", bias=True, qkv_bias=True),
    Family("mistral", window=True),
    Family("qwen2", qkv_bias=True),
    Family("qwen3", qk_norm=True),
    Family("mixtral", experts=True, window=True),
    Family("qwen2_moe", qkv_bias=True, experts=True, shared=True),
    Family("qwen3_moe", qk_norm=True, experts=True),
    Family("glm4_moe", experts=True, shared=True, sigmoid=True, mtp=True, either=("qkv_bias", "qk_norm")),
    Family("deepseek_v2", qk_norm=True, experts=True, shared=True, latent=True),
    Family("deepseek_v3", qk_norm=True, experts=True, shared=True, latent=True, sigmoid=True, mtp=True),
    Family("gpt_neox", rms=False, gated=False, bias=True, qkv_bias=True),
    Family("gpt2", rope=False, rms=False, gated=False, bias=True, qkv_bias=True),
)

POSITIONS = ("learned_absolute", "rope")
NORMS = {"layernorm": False, "rmsnorm": True, "layernorm1p": False}


def family_of(arguments: Arguments, wanted: str | None) -> Family:
    """The family of a run (UnsupportedInput if none fits); must be `wanted`, a `model_type`, if the user gives one."""
    parts = _parts(arguments)
    fitting = [
        family
        for family in FAMILIES
        if all(
            getattr(family, name) == value for name, value in parts.items() if name not in ("window", *family.either)
        )
        and (family.window or not parts["window"])
    ]
    if chosen := [family for family in fitting if wanted in (None, family.model_type)]:
        return chosen[0]
    if fitting:
        raise UnsupportedInput(
            f"the arguments of `{arguments.source}` describe a {fitting[0].model_type}, `--config` a {wanted}",
            hint=f"`model_type` may be {' or '.join(family.model_type for family in fitting)}",
        )
    raise UnsupportedInput(
        f"no supported model has what `{arguments.source}` was trained with: {listing(_described(parts))}",
        hint="convert it with Megatron Bridge, which builds the model with Megatron's own code",
    )


def _parts(arguments: Arguments) -> dict[str, Any]:
    """The attributes of a Family, from the arguments."""
    bias = has_bias(arguments)
    # whether the norms are RMSNorm; UnsupportedInput unless that or LayerNorm
    kind = arguments.word("normalization", "LayerNorm").lower()
    if kind not in NORMS:
        raise arguments.unsupported("normalization")
    return {
        "latent": arguments.flag("multi_latent_attention"),
        "sigmoid": has_sigmoid(arguments),
        "rope": position_kind(arguments) == "rope",
        "rms": NORMS[kind],
        "gated": arguments.flag("swiglu"),
        "bias": bias,
        "qkv_bias": bias or arguments.flag("add_qkv_bias"),
        "qk_norm": arguments.flag("qk_layernorm"),
        "experts": bool(arguments.values.get("num_experts")),
        "shared": bool(arguments.values.get("moe_shared_expert_intermediate_size")),
        "window": window_of(arguments) is not None,
    }


def _described(parts: Mapping[str, Any]) -> list[str]:
    words = {
        "latent": ("latent attention (MLA)", ""),
        "sigmoid": ("a router with sigmoids", ""),
        "rope": ("rotary positions", "learned positions"),
        "rms": ("RMSNorm", "LayerNorm"),
        "gated": ("a gated feed-forward", "a GELU"),
        "bias": ("biases", "no biases"),
        "qkv_bias": ("biases of queries, keys and values", ""),
        "qk_norm": ("norms of queries and keys", ""),
        "experts": ("experts", ""),
        "shared": ("a shared expert", ""),
        "window": ("a window", ""),
    }
    found = [words[name][0 if value else 1] for name, value in parts.items()]
    return [word for word in found if word]


def has_bias(arguments: Arguments) -> bool:
    """Whether every linear layer has a bias: Megatron's default, under the names of both ages."""
    if "add_bias_linear" in arguments.values:
        return arguments.flag("add_bias_linear")
    return not arguments.flag("disable_bias_linear")


def position_kind(arguments: Arguments) -> str:
    """`rope` or `learned_absolute` (else UnsupportedInput); before core 0.5 two flags decided it."""
    if arguments.flag("use_rotary_position_embeddings"):
        return "rope"
    kind = arguments.word("position_embedding_type", POSITIONS[0])
    if kind not in POSITIONS:
        raise arguments.unsupported("position_embedding_type")
    if kind == POSITIONS[0] and not arguments.flag("add_position_embedding", default=True):
        raise arguments.unsupported("add_position_embedding")
    return kind


def window_of(arguments: Arguments) -> int | None:
    """The number of tokens that a token sees, itself included; None where it sees all.

    Megatron's pair counts the tokens before and after it (`core/transformer/utils.py`, `window` masks). Raises
    MalformedInput if it is not a pair of numbers, UnsupportedInput if tokens would see later ones.
    """
    if (value := arguments.values.get("window_size")) is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2 or any(type(side) is not int for side in value):
        raise arguments.invalid("window_size", value, "a pair of numbers")
    before, after = value
    if after not in (0, -1) or before < -1:
        raise arguments.unsupported("window_size")
    return None if before == -1 else before + 1


SIZES = {  # fields of `config.json` with the value of an argument
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
    "partial_rotary_factor": "rotary_percent",
    "n_routed_experts": "num_experts",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}

FREE = ("max_position_embeddings", "n_positions", "vocab_size", "model_type")
"""Fields in which the user's configuration may differ from the run's."""


def arguments_of(config: Mapping[str, Any], source: str) -> Arguments:
    """Arguments for a run without any, from a whole `config.json` or Megatron's own by the user (else InputRefused)."""
    if "num_layers" in config and "model_type" not in config:
        return Arguments(config, source)
    fields = {ALIASES.get(name, name): value for name, value in config.items()}
    if (family := next((row for row in FAMILIES if row.model_type == fields.get("model_type")), None)) is None:
        raise InputRefused(
            f"`{source}` does not contain the arguments of its run",
            hint="give the model's `config.json` with `--config`, or a YAML file with Megatron's arguments",
        )
    nested = fields.get("rope_parameters")
    rope = {"rope_theta": fields.get("rope_theta"), **(nested if isinstance(nested, dict) else {})}
    fields.setdefault("partial_rotary_factor", rope.get("partial_rotary_factor"))
    made = {own: fields[name] for name, own in SIZES.items() if fields.get(name) is not None}
    bias = family.bias and (family.model_type != "llama" or fields.get("mlp_bias") is True)
    window = fields.get("sliding_window")
    made |= {
        "rotary_base": rope.get("rope_theta") or fields.get("rotary_emb_base"),
        "swiglu": family.gated,
        "normalization": "RMSNorm" if family.rms else "LayerNorm",
        "position_embedding_type": "rope" if family.rope else "learned_absolute",
        "add_bias_linear": bias,
        "add_qkv_bias": family.qkv_bias or ("qkv_bias" in family.either and fields.get("attention_bias") is True),
        "qk_layernorm": family.qk_norm or fields.get("use_qk_norm") is True,
        "bias_gelu_fusion": fields.get("activation_function", fields.get("hidden_act", "")) != "gelu",
        "moe_router_pre_softmax": fields.get("norm_topk_prob", True) is False,
        "moe_shared_expert_gate": family.shared and not (family.latent or family.sigmoid),
        "untie_embeddings_and_output_weights": not fields.get("tie_word_embeddings", not family.rope),
        "window_size": (window - 1, 0) if family.window and isinstance(window, int) and window > 0 else None,
    }
    if family.latent or family.sigmoid:
        words = ("moe_intermediate_size", "n_shared_experts", "num_hidden_layers", "first_k_dense_replace")
        size, shared, layers, dense = (
            value if type(value := fields.get(name, 0)) is int and 0 <= value < LAYER_LIMIT * HEAD_LIMIT else 0
            for name in words
        )
        made |= {
            "multi_latent_attention": family.latent,
            "rope_type": "rope",  # the user's fields say how positions are scaled
            "moe_router_score_function": "sigmoid" if family.sigmoid else "softmax",
            "moe_router_pre_softmax": not family.sigmoid,
            "moe_shared_expert_intermediate_size": size * shared,
            "moe_layer_freq": [int(layer >= dense) for layer in range(min(layers, LAYER_LIMIT))],
        }
    return Arguments(made, source)


def merged(computed: Mapping[str, Any], given: Mapping[str, Any], source: str, *, compared: bool) -> dict[str, Any]:
    """The config with the user's fields; MalformedInput for a contradiction if `compared` (the run's own arguments)."""
    own, other = _settings(computed), _settings(given)
    for name, value in own.items() if compared else ():
        if name in other and name not in FREE and other[name] not in (None, value):
            raise MalformedInput(
                f"`--config` declares `{name}` {short(other[name])}, the arguments of `{source}` {short(value)}",
                hint="the configuration is of another model; leave the field out, the arguments contain it",
            )
    return updated(
        computed, {name: value for name, value in given.items() if value is not None or name not in computed}
    )


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
