"""PaddleNLP's `config.json` for a Hugging Face model: the reverse of `config.py`, and checked against it.

Source: `configuration.py` and `modeling.py` (`_init_rope`) in paddlenlp `transformers/<family>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.formats.paddle.config import ACTIVATIONS, GLM_FIXED, KEPT, to_config
from llmconv.convert.models.model_config import ModelSettings, settings_of
from llmconv.convert.models.unsupported_settings import refuse, refuse_other_settings, refuse_settings
from llmconv.errors import UnsupportedInput

PADDLE = "PaddleNLP"
SCALING = {"linear": "linear", "dynamic": "dynamic_ntk"}
"""transformers' `rope_type` to `rope_scaling_type`."""

LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The fields of Llama 3.1's `rope_scaling` that PaddleNLP 3 reads."""

SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
DECODER = (*SAME, "intermediate_size", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta")


def config_of(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Paddle's `config.json`, and the Hugging Face config that `to-hf` makes of it.

    Raises:
        UnsupportedInput: PaddleNLP cannot express the model; lists the fields.
        MalformedInput: a size is missing, or is not a positive number.
    """
    settings, source = settings_of(checkpoint), checkpoint.path.name
    if settings["model_type"] not in WRITERS:
        raise UnsupportedInput(
            f"`{source}` is a `{settings['model_type']}`, which cannot be written in PaddleNLP's format",
            hint=f"models of these types can be written: {', '.join(WRITERS)}",
        )
    kind, architecture, write = WRITERS[settings["model_type"]]
    kept = {name: checkpoint.config[name] for name in KEPT if name in checkpoint.config}
    config = {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype")),
        **kept,
        "tie_word_embeddings": settings["tie_word_embeddings"],
        **write(settings, source),
    }
    back = to_config(config, source, [])
    refuse_other_settings(checkpoint, back, PADDLE)
    return config, back


def _decoder(settings: ModelSettings, source: str) -> dict[str, Any]:
    if settings["head_dim"] * settings["num_attention_heads"] != settings["hidden_size"]:
        refuse(source, {"head_dim": settings["head_dim"]}, PADDLE)
    refuse_settings(source, settings, {"hidden_act": "silu"}, PADDLE)
    return {
        **{name: settings[name] for name in DECODER},
        "seq_length": settings["max_position_embeddings"],
        "rope_scaling_type": None,
        "rope_scaling_factor": 1.0,
    }


def _llama(settings: ModelSettings, source: str) -> dict[str, Any]:
    scaling = settings["rope_scaling"] or {}
    scaled: dict[str, Any] = {}
    if scaling.get("rope_type") == "llama3" and set(scaling) == {"rope_type", *LLAMA3_SCALING}:
        scaled = {"rope_scaling": dict(scaling)}
    elif scaling.get("rope_type") in SCALING and set(scaling) == {"rope_type", "factor"}:
        kind = SCALING[scaling["rope_type"]]
        scaled = {"rope_scaling_type": kind, "rope_scaling_factor": scaling["factor"]}
    return _decoder(settings, source) | scaled


def _mistral(settings: ModelSettings, source: str) -> dict[str, Any]:
    window = settings["sliding_window"]
    return _decoder(settings, source) | {"sliding_window": window[0] if window else None}


def _qwen2(settings: ModelSettings, source: str) -> dict[str, Any]:
    return _decoder(settings, source) | {"use_sliding_window": False}


def _bloom(settings: ModelSettings, source: str) -> dict[str, Any]:
    return {
        **{name: settings[name] for name in ("vocab_size", "hidden_size", "layer_norm_epsilon")},
        "n_layer": settings["num_hidden_layers"],
        "n_head": settings["num_attention_heads"],
        "apply_residual_connection_post_layernorm": settings["apply_residual_connection_post_layernorm"],
    }


def _gpt(settings: ModelSettings, source: str) -> dict[str, Any]:
    ours = {theirs: name for name, theirs in reversed(ACTIVATIONS.items())}
    return {
        **{name: settings[name] for name in (*SAME, "intermediate_size", "max_position_embeddings")},
        "hidden_activation": ours.get(settings["activation_function"], "gelu"),
        "layer_norm_eps": settings["layer_norm_epsilon"],
    }


def _chatglm(settings: ModelSettings, source: str) -> dict[str, Any]:
    return {
        **GLM_FIXED,
        **{name: settings[name] for name in SAME},
        "padded_vocab_size": settings["vocab_size"],
        "ffn_hidden_size": settings["intermediate_size"],
        "multi_query_group_num": settings["num_key_value_heads"],
        "kv_channels": settings["head_dim"],
        "max_sequence_length": settings["max_position_embeddings"],
        "layernorm_epsilon": settings["rms_norm_eps"],
        "rope_ratio": settings["rope_theta"] / 10000.0,
        "add_qkv_bias": settings["attention_bias"],
    }


WRITERS: Mapping[str, tuple[str, str, Callable[[ModelSettings, str], dict[str, Any]]]] = {
    "llama": ("llama", "LlamaForCausalLM", _llama),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", _qwen2),
    "mistral": ("mistral", "MistralForCausalLM", _mistral),
    "bloom": ("bloom", "BloomForCausalLM", _bloom),
    "gpt2": ("gpt", "GPTForCausalLM", _gpt),
    "glm": ("chatglm_v2", "ChatGLMv2ForCausalLM", _chatglm),
}
"""Transformers' `model_type` to Paddle's, with its class."""
