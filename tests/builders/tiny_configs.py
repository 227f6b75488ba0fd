"""Configurations of tiny models of types that need more than small sizes by field name (`tools/tiny_models.py`)."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2}
HYBRID: dict[str, Any] = {"layer_types": ["hybrid", "hybrid_sliding"], "swa_num_attention_heads": 4}
WINDOWS: dict[str, Any] = {
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "d_rel": 4,
    "rel_extent": 8,
}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}

CONFIGS: dict[str, dict[str, Any]] = {
    "cosmos3_edge": {
        "text_config": {**TEXT, "head_dim": 16, "rope_parameters": MROPE},
        "vision_config": TOWER,
        "projector_hidden_size": 48,
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            **TEXT,
            "moe_intermediate_size": [24, 16],
            "moe_num_experts": 4,
            "moe_k": 2,
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": MROPE,
        },
        "vision_config": {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 48},
    },
    "glm5_next": {
        "text_config": {
            **TEXT,
            **EXPERTS,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["linear_attention", "full_attention"],
            "indexer_types": ["full", "full"],
            "index_head_dim": 16,
            "index_n_heads": 2,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "projection_intermediate_size": 80,
        },
    },
    "inkling2": {
        "text_config": {**TEXT, **EXPERTS, **HYBRID, **WINDOWS, "unpadded_vocab_size": 131},
        "vision_config": {**TOWER, "text_hidden_size": 64, "projection_hidden_dim": 48},
    },
    "inkling_mm_model": {
        "text_config": {**TEXT, **EXPERTS, **HYBRID, **WINDOWS, "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"text_hidden_size": 64, "hidden_size": 32, "n_layers": 2, "num_attention_heads": 2},
        "audio_config": {"text_hidden_size": 64, "n_mel_bins": 8, "mel_vocab_size": 16},
    },
    "molmo2": {
        "text_config": {**TEXT, "head_dim": 16, "additional_vocab_size": 8},
        "vision_config": {**TOWER, "head_dim": 16, "num_position_embeddings": 9, "image_size": [42, 42]},
        "adapter_config": {
            "vision_feature_layer": [-1],
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 48,
            "text_hidden_size": 64,
        },
    },
    "granite_docling": {
        "text_config": TEXT,
        "vision_config": {
            **{name: value for name, value in TOWER.items() if name != "num_key_value_heads"},
            "image_size": 64,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "lfm3_vl": {
        "text_config": {**TEXT, "head_dim": 16, "layer_types": ["conv", "full_attention"]},
        "vision_config": {**TOWER, "layer_types": ["conv", "full_attention"]},
        "projector_hidden_size": 48,
    },
    "muse_spark": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [10000.0, 0],
            "moe_intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_hidden_size": 32,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {
            **{name: value for name, value in TOWER.items() if name != "num_key_value_heads"},
            "layer_types": ["window_attention", "full_attention"],
        },
        "audio_config": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "out_hidden_size": 64},
        "out_hidden_size": 96,
        "projector_hidden_size": 48,
    },
    "qwen2_5_omni_thinker": {
        "text_config": {**TEXT, "rope_parameters": MROPE},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        "audio_config": {
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "d_model": 32,
            "output_dim": 64,
        },
    },
    "qwen3_omni_moe_thinker": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "rope_parameters": MROPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        "audio_config": {
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "d_model": 32,
            "output_dim": 64,
            "downsample_hidden_size": 16,
        },
    },
    "unlimited_ocr": {
        "text_config": {**TEXT, **EXPERTS, "head_dim": 16, "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {
            "sam_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 64,
                "global_attn_indexes": [1],
                "mlp_dim": 48,
                "downsample_channels": [16, 32],
            },
            "encoder_config": {name: value for name, value in TOWER.items() if name != "num_key_value_heads"},
        },
    },
}
