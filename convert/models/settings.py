"""What a model computes, as its `config.json` says: every field that changes a logit, defaults filled in.

Two configurations with equal settings are of one model; so a format is proved to hold a model where the configuration
that `to-hf` will make has the settings of the one at hand. Names and defaults: transformers' `configuration_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.algebra.operations import listing
from llmconv.convert.models.llama_like import read_decoder
from llmconv.convert.models.tied_head import settle_head
from llmconv.errors import UnsupportedInput

ALIASES = {
    "n_embed": "hidden_size",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
"""Names of GPT-2 and BLOOM for what the others call so."""

WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
PARTIAL = "partial_rotary_factor"
FLAGS = {"hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
ROTARY = {**FLAGS, "rms_norm_eps": 1e-6}
GLM = {
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    PARTIAL: 0.5,
}
GPT2 = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
BLOOM = {
    "layer_norm_epsilon": 1e-5,
    "apply_residual_connection_post_layernorm": False,
    "tie_word_embeddings": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**ROTARY, "max_position_embeddings": 2048},
    "mistral": {**ROTARY, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**ROTARY, **WINDOW, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {**ROTARY, **WINDOW, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "glm": {**ROTARY, **GLM},
    "gpt2": GPT2,
    "bloom": BLOOM,
}
"""By `model_type`, what transformers takes for a field that is not there."""

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ABSOLUTE: dict[str, tuple[str, ...]] = {"gpt2": (*SIZES, *GPT2), "bloom": (*SIZES[:2], *SIZES[3:], *BLOOM)}
"""The fields of the models without rotary positions."""

Settings = Mapping[str, Any]


def settings_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings of a model, under one name each whichever transformers wrote them, its `model_type` first.

    Raises:
        UnsupportedInput: a `model_type` that is not read here.
        MalformedInput: a size is missing or no number, or the sizes contradict each other.
    """
    kind = str(checkpoint.config.get("model_type"))
    if kind not in DEFAULTS:
        raise UnsupportedInput(
            f"`{checkpoint.path.name}` is a `{kind}`, which this format cannot hold",
            hint=f"models of these types can be written: {', '.join(DEFAULTS)}",
        )
    named = {ALIASES.get(name, name): value for name, value in checkpoint.config.items()}
    fields = {**DEFAULTS[kind], **named}
    if kind not in ABSOLUTE:
        return {"model_type": kind, **_rotary(replace(checkpoint, config=fields))}
    if kind == "gpt2" and fields.get("intermediate_size") is None and isinstance(fields.get("hidden_size"), int):
        fields["intermediate_size"] = 4 * fields["hidden_size"]
    return {"model_type": kind, **{name: fields.get(name) for name in ABSOLUTE[kind]}}


def _rotary(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings of Llama and its kin."""
    fields, decoder = checkpoint.config, read_decoder(checkpoint)
    scaling = {name: value for name, value in decoder.scaling.items() if name != PARTIAL}
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    sizes = (decoder.vocabulary, decoder.hidden, decoder.intermediate, decoder.layers, decoder.heads)
    return {
        **dict(zip(SIZES, sizes, strict=True)),
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "max_position_embeddings": decoder.max_positions,
        "rms_norm_eps": decoder.eps,
        "rope_theta": decoder.theta,
        "rope_scaling": None if scaling in ({}, {"rope_type": "default"}) else scaling,
        PARTIAL: rope.get(PARTIAL, fields.get(PARTIAL, 1.0)),
        **{name: fields[name] for name in FLAGS},
        "sliding_window": _window(fields, decoder.layers),
    }


def _window(fields: Mapping[str, Any], layers: int) -> tuple[Any, list[int] | None] | None:
    """Size of the attention window and the layers that have it (None: all of them), if there is one."""
    window, kinds, first = fields.get("sliding_window"), fields.get("layer_types"), fields.get("max_window_layers")
    if window is None or fields.get("use_sliding_window") is False:
        return None
    if "use_sliding_window" not in fields:
        return window, None
    if isinstance(kinds, list):
        sliding = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    else:
        sliding = list(range(first if isinstance(first, int) else 0, layers))
    return (window, sliding) if sliding else None


def tied(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without an output head that is the embedding, and with a `tie_word_embeddings` that says so.

    Raises:
        InputRefused: as `settings_of`.
    """
    tensors = dict(checkpoint.tensors)
    config = {**checkpoint.config, "tie_word_embeddings": settings_of(checkpoint)["tie_word_embeddings"]}
    return replace(checkpoint, config=settle_head(tensors, config, []), tensors=tensors)


def refuse_other_settings(checkpoint: Checkpoint, back: Mapping[str, Any], what: str) -> None:
    """Refuses a model that would come back with other settings.

    Args:
        checkpoint: the model.
        back: the `config.json` that `to-hf` will make of what is written.
        what: the format, such as `PaddleNLP`.

    Raises:
        UnsupportedInput: lists the fields.
    """
    own, told = settings_of(checkpoint), settings_of(replace(checkpoint, config=dict(back)))
    refuse(checkpoint.path.name, {name: value for name, value in own.items() if told.get(name) != value}, what)


def refuse_settings(source: str, settings: Settings, held: Settings, what: str) -> None:
    """Refuses a model with another setting than those in `held`.

    Raises:
        UnsupportedInput: lists the fields.
    """
    odd = {name: settings[name] for name, value in held.items() if settings.get(name, value) != value}
    refuse(source, odd, what)


def refuse(source: str, odd: Settings, what: str) -> None:
    """Refuses a model for the settings `odd`, if there are any.

    Raises:
        UnsupportedInput: lists the fields.
    """
    if odd:
        raise UnsupportedInput(
            f"`{source}` has what {what} cannot hold: {listing([f'{name} {value}' for name, value in odd.items()])}",
            hint="choose another `--to`, or keep the Hugging Face folder",
        )
