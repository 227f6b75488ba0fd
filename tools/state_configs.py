"""Tiny models whose layers have states: every kind of layer occurs at least three times."""

from __future__ import annotations

from typing import Any

DECODER = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHORT = {name: DECODER[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")}
MAMBA = {**SHORT, "num_hidden_layers": 4, "state_size": 8, "time_step_rank": 4}
MIXED = {**DECODER, "num_hidden_layers": 8}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
"""Multi-head latent attention, and experts."""

STATE_CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": {**SHORT, "num_hidden_layers": 4, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    "lfm2": {
        **MIXED,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"] * 4,
        "block_multiple_of": 32,
    },
    "lfm3": {
        **MIXED,
        "num_hidden_layers": 12,
        "head_dim": 16,
        "conv_L_cache": 4,
        "sliding_window": 8,
        "layer_types": ["conv", "sliding_attention", "full_attention"] * 4,
    },
    "lfm2_moe": {
        **MIXED,
        "num_hidden_layers": 12,
        "layer_types": ["conv", "full_attention"] * 6,
        "conv_L_cache": 3,
        "num_dense_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "jamba": {
        **MIXED,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "bamba": {
        **MIXED,
        "attn_layer_indices": [1, 3, 5, 7],
        **MAMBA2,
    },
    "falcon_h1": {
        **DECODER,
        "head_dim": 16,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
    },
    "granitemoehybrid": {
        **MIXED,
        "layer_types": ["linear_attention", "full_attention"] * 4,
        **MAMBA2,
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
    },
    "nemotron_h": {
        **{name: value for name, value in DECODER.items() if name != "num_hidden_layers"},
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"] * 4,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 8,
        "n_groups": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 40,
    },
    "zamba2": {
        **SHORT,
        "num_hidden_layers": 12,
        "layers_block_type": ["linear_attention", "hybrid"] * 6,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "num_mem_blocks": 2,
        "adapter_rank": 8,
        "use_mem_rope": True,
    },
    "kimi_linear": {
        **MIXED,
        **LATENT,
        "layer_types": ["linear_attention", "full_attention"] * 4,
        "mlp_layer_types": ["dense", "sparse"] * 4,
        "linear_head_dim": 12,
        "linear_num_heads": 4,
    },
    "bailing_hybrid": {
        **MIXED,
        **LATENT,
        "layer_types": ["linear_attention", "full_attention"] * 4,
        "mlp_layer_types": ["dense", "sparse"] * 4,
        "head_dim": 12,
    },
    "olmo_hybrid": {**MIXED, "layer_types": ["linear_attention", "full_attention"] * 4, **DELTA},
    "qwen3_5_text": {**MIXED, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 4, **DELTA},
    "qwen3_5_moe_text": {
        **MIXED,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 4,
        **DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_next": {
        **MIXED,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 4,
        **DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
"""More heads than groups, value heads than key heads, and value sizes that are not key sizes."""
