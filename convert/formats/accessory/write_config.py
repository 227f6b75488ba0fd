"""LLaMA2-Accessory's plugin and ModelArgs of a model: the reverse of `config.py`, and checked against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, nextafter
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.formats.accessory.config import AccessoryParams, read_params, to_config
from llmconv.convert.formats.accessory.names import ATTENTION, MLP
from llmconv.convert.formats.meta.config import feed_forward_of
from llmconv.convert.models.model_config import LlamaLikeConfig, read_decoder
from llmconv.convert.models.unsupported_settings import refuse_fields, refuse_other_values

CODE = "LLaMA2-Accessory's code"
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "mixtral", "falcon"),
    "hidden_act": ("silu",),
    "activation": ("gelu",),
    "sliding_window": (),
    "alibi": (),
}
NO_BIASES: dict[str, tuple[Any, ...]] = {"attention_bias": (), "mlp_bias": ()}
FALCON_DEFAULTS = {"bias": False, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True}
"""transformers' defaults for missing fields (`FalconConfig`)."""


@dataclass(frozen=True)
class AccessoryArgs:
    """Accessory's description of a model.

    Attributes:
        plugin: the `llama_type` of `meta.json`.
        params: the sizes; its `fields` are the content of `config.json`.
        shared: name to size of all that is divided among ranks.
        settings: the Hugging Face config that `to-hf` makes of it.
        biases: linear layers with a bias that the table of names lacks, by the last word of Hugging Face's names.
    """

    plugin: str
    params: AccessoryParams
    shared: Mapping[str, int]
    settings: Mapping[str, Any]
    biases: tuple[str, ...] = ()


def args_of(checkpoint: Checkpoint) -> AccessoryArgs:
    """The plugin and arguments of a model.

    Raises:
        UnsupportedInput: there is no plugin for the model; lists the fields.
        MalformedInput: the config has invalid sizes.
    """
    plugin = checkpoint.config.get("model_type")
    decoder = read_decoder(_like_a_llama(checkpoint) if plugin == "falcon" else checkpoint)
    refuse_fields(decoder, SUPPORTED if plugin == "llama" else SUPPORTED | NO_BIASES, CODE)
    fields = _fields(decoder)
    switches = {"attention_bias": ATTENTION, "mlp_bias": MLP}
    biases = tuple(layer for switch, layers in switches.items() if decoder.fields.get(switch) for layer in layers)
    if biases:
        plugin, fields = "llama_peft", fields | {"lora_rank": -1, "bias_tuning": True, "norm_tuning": True}
    params = read_params(fields, decoder.model_type, decoder.source)
    settings = to_config(params, decoder.vocabulary, decoder.source)
    _refuse_others(decoder, params, settings)
    return AccessoryArgs(str(plugin), params, _shared(decoder, params), settings, biases)


def _fields(decoder: LlamaLikeConfig) -> dict[str, Any]:
    """The plugin's ModelArgs."""
    common = {
        "vocab_size": decoder.vocabulary,
        "rope_theta": decoder.theta,
        "max_batch_size": 32,
        "max_seq_len": decoder.max_positions,
        "rope_scaling": _position_factor(decoder),
    }
    if decoder.model_type == "falcon":
        sizes = {"num_layers": decoder.layers, "hidden_size": decoder.hidden, "num_attention_heads": decoder.heads}
        kinds = {name: bool(decoder.fields[name]) for name in FALCON_DEFAULTS}
        kinds["multi_query"] = decoder.kv_heads == 1
        sizes |= {name: decoder.fields.get(name, 0.0) for name in ("attention_dropout", "hidden_dropout")}
        return {**sizes, **kinds, "num_kv_heads": decoder.heads, "layer_norm_epsilon": decoder.eps, **common}
    sizes = {"dim": decoder.hidden, "n_layers": decoder.layers, "n_heads": decoder.heads}
    common |= {"n_kv_heads": decoder.kv_heads, "norm_eps": decoder.eps}
    if decoder.model_type == "llama":
        return {**sizes, "ffn_dim_multiplier": None, **feed_forward_of(decoder.hidden, decoder.intermediate), **common}
    experts = {
        "num_experts_per_tok": decoder.fields.get("num_experts_per_tok", 2),
        "num_experts": decoder.fields.get("num_local_experts", 8),
    }
    return {**sizes, "hidden_dim": decoder.intermediate, "head_dim": decoder.head_dim, "moe": experts, **common}


def _like_a_llama(checkpoint: Checkpoint) -> Checkpoint:
    """A Falcon's config with the sizes also in a Llama's fields."""
    config = {**FALCON_DEFAULTS, **checkpoint.config}
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    kv_heads = config.get("num_kv_heads") or heads
    if config["multi_query"] and not config["new_decoder_architecture"]:
        kv_heads = 1
    sizes = {
        "num_key_value_heads": kv_heads,
        "intermediate_size": config.get("ffn_hidden_size") or (4 * hidden if isinstance(hidden, int) else None),
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }
    return replace(checkpoint, config={**config, **sizes})


def _refuse_others(decoder: LlamaLikeConfig, params: AccessoryParams, settings: Mapping[str, Any]) -> None:
    """Refuses values that upstream's code would compute differently, since it has no fields for them."""
    read_back = {"head_dim": params.head_dim, "intermediate_size": params.intermediate, "rope": {}}
    if settings["rope_scaling"]:  # the last bit of the division may differ
        read_back["rope"] = {**settings["rope_scaling"], "factor": decoder.scaling.get("factor")}
    own = {"head_dim": decoder.head_dim, "intermediate_size": decoder.intermediate, "rope": dict(decoder.scaling)}
    if params.family == "falcon":
        norms = "num_ln_in_parallel_attn"
        read_back |= {"num_kv_heads": settings["num_kv_heads"], norms: settings[norms]}
        own |= {"num_kv_heads": decoder.kv_heads, norms: decoder.fields.get(norms) or settings[norms]}
    refuse_other_values(decoder, own, read_back, CODE)


def _shared(decoder: LlamaLikeConfig, params: AccessoryParams) -> dict[str, int]:
    """The sizes that are divided among ranks; a single key/value head of Falcon is copied."""
    sizes = {"hidden_size": decoder.hidden, "num_attention_heads": decoder.heads, "vocab_size": decoder.vocabulary}
    if params.family != "falcon" or decoder.kv_heads > 1:
        sizes["num_key_value_heads"] = decoder.kv_heads
    if params.family == "mixtral":
        return sizes | {"num_local_experts": params.experts}
    return sizes | {"intermediate_size": decoder.intermediate}


def _position_factor(decoder: LlamaLikeConfig) -> float | None:
    """Upstream's `rope_scaling`, which multiplies positions; transformers divides them by `factor`."""
    factor = decoder.scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1e-12 < factor < 1e12:
        return None
    near = 1 / factor
    return next((value for value in (near, nextafter(near, 0), nextafter(near, inf)) if 1.0 / value == factor), near)
