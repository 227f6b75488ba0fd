"""The arguments of a Megatron run, read as data and checked one by one, with their types.

They have the names of Megatron-LM's command line, whatever container they are in. Tables list arguments with one
allowed value and those without an effect on the model; any other that is set and whose name looks like part of a model
is refused. Source: NVIDIA/Megatron-LM 2.5 to core 0.19, `megatron/training/arguments.py`,
`core/transformer/transformer_config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmconv.errors import MalformedInput, UnsupportedInput, listing

COUNT_LIMIT = 1 << 31
CAPACITY = "moe_expert_capacity_factor"


@dataclass(frozen=True)
class Arguments:
    """The arguments of a run by name, objects as stubs; methods raise MalformedInput for other kinds of values."""

    source: str
    values: Mapping[str, Any]

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer; MalformedInput if it is missing without a default."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < COUNT_LIMIT:
            raise self.invalid(name, value, "a positive number")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            raise self.invalid(name, value, "a positive number")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.invalid(name, value, "true or false")
        return value

    def word(self, name: str, default: str) -> str:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.invalid(name, value, "a word")
        return value

    def invalid(self, name: str, value: Any, expected: str) -> MalformedInput:
        return MalformedInput(
            f"the argument `{name}` of `{self.source}` is {str(value)[:40]}; expected {expected}",
            hint="the checkpoint was changed, or is not one of a language model",
        )

    def unsupported(self, name: str) -> UnsupportedInput:
        return UnsupportedInput(
            f"`{self.source}` was trained with `{name}` {str(self.values.get(name))[:40]}, which is unsupported",
            hint="convert it with Megatron Bridge, which builds the model with Megatron's own code",
        )


def check_arguments(arguments: Arguments, *, described: bool, old: bool) -> list[str]:
    """Refuses (UnsupportedInput) arguments that give a model which no supported family has; returns warnings.

    With `described` the user gives the model's `config.json`, so unknown arguments are only reported; `old` is a model
    of before Megatron core.
    """
    for name, allowed in (NEUTRAL | (OLD_MODEL if old else {})).items():
        if not _is_one_of(arguments.values.get(name), allowed):
            raise arguments.unsupported(name)
    unknown = list(_unknown(arguments))
    if unknown and not described:
        raise UnsupportedInput(
            f"`{arguments.source}` was trained with unknown arguments that may change the model: {listing(unknown)}",
            hint="if they do not change it, give the model's whole `config.json` with `--config`",
        )
    warnings = [f"ignored unknown arguments: {listing(unknown)}"] if unknown else []
    if not _is_one_of(arguments.values.get(CAPACITY), OFF):
        warnings.append(f"`{CAPACITY}` drops tokens of full experts in Megatron; the converted model drops none")
    return warnings


def _unknown(arguments: Arguments) -> Iterator[str]:
    for name, value in arguments.values.items():
        known = name in NEUTRAL or name in IGNORED or IGNORED_PREFIXES.fullmatch(name)
        if SENSITIVE.search(name) and not known and not _is_one_of(value, OFF):
            yield name


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether an argument is missing or has one of these values; True is not 1."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


OFF: tuple[Any, ...] = (None, False, 0, "", [], (), {}, "none")  # values of an argument that is not set
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": OFF,
    "add_decoder": OFF,
    "attention_output_gate": OFF,
    "apply_residual_connection_post_layernorm": OFF,
    "decoder_num_layers": OFF,
    "enable_hyper_connections": OFF,
    "experimental_attention_variant": OFF,
    "glu_linear_offset": OFF,
    "heterogeneous_block_specs": OFF,
    "heterogeneous_layers_config_encoded_json": OFF,
    "heterogeneous_layers_config_path": OFF,
    "hybrid_attention_ratio": OFF,
    "hybrid_layer_pattern": OFF,
    "hybrid_mlp_ratio": OFF,
    "hybrid_override_pattern": OFF,
    "is_hybrid_model": OFF,
    "linear_attention_freq": OFF,
    "moe_apply_probs_on_input": OFF,
    "moe_extended_tp": OFF,
    "moe_latent_size": OFF,
    "moe_mlp_glu_interleave_size": OFF,
    "moe_router_enable_expert_bias": OFF,
    "moe_router_force_biased": OFF,
    "moe_router_force_load_balancing": OFF,
    "moe_router_group_topk": OFF,
    "moe_router_num_groups": OFF,
    "moe_router_score_function": ("softmax", *OFF),
    "moe_router_topk_limited_devices": OFF,
    "moe_router_topk_scaling_factor": (1, *OFF),
    "moe_shared_expert_glu_interleave_size": OFF,
    "mrope_section": OFF,
    "multi_latent_attention": OFF,
    "no_rope_freq": OFF,
    "num_tokentypes": OFF,
    "qk_l2_norm": OFF,
    "quick_geglu": OFF,
    "retro_add_retriever": OFF,
    "rope_type": ("rope", *OFF),
    "rotary_scaling_factor": (1, *OFF),
    "rotary_seq_len_interpolation_factor": (1, *OFF),
    "softmax_scale": OFF,
    "softmax_type": ("vanilla", *OFF),
    "spec": OFF,
    "squared_relu": OFF,
    "use_mup": OFF,
    "window_attn_skip_freq": OFF,
}
"""Arguments that change the model, and the values with which they do not.

`rotary_seq_len_interpolation_factor` is here since Megatron-LM's own models ignore it from core 0.6 to 0.18 only.
"""

OLD_MODEL: dict[str, tuple[Any, ...]] = {"rotary_base": (None, 10000), "rotary_interleaved": OFF}
"""Arguments that the model of before Megatron core ignores, and the values with which that makes no difference."""

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
IGNORED = frozenset(_IGNORED_WORDS.split())
"""Arguments that are read by `families`, and those that concern speed, memory, precision or training."""

IGNORED_PREFIXES = re.compile(
    r"(?:no_|dino_|dsa_|inference_|kv_|linear_|log_|logits_|mamba_|mhc_|mtp_|mscale|mup_|q_lora|qk_clip|qk_head_dim|"
    r"qk_pos_emb_head_dim|relative_attention_|retriever_|retro_|rl_|yarn_|experimental_attention_variant_loss|"
    r"moe_(?:combine|deepep|dispatch|flex|hybridep|ncclep|pad_|paged|permute|router_padding|router_quantile|"
    r"routing_trace|token_))\w*"
)
"""Groups of arguments with defaults other than off, which have an effect only with one of `NEUTRAL`, or none."""

SENSITIVE = re.compile(  # parts of names that suggest that an argument changes the model
    r"attention|attn|rope|rotary|(?<!de)norm(?!al)|moe_|expert|glu|residual|softmax|window|position|logit|qk_|embedding|"
    r"mamba|hybrid|_mla|linear_|activation|latent|tokentype|hyper_conn|mtp"
)
