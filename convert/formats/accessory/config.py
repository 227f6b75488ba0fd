"""LLaMA2-Accessory's `config.json` or `params.json` (its ModelArgs) as the `config.json` of a transformers model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, nextafter
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.fields import Fields
from llmconv.convert.formats.meta import LLAMA, feed_forward_of, intermediate_of
from llmconv.convert.models.model_config import LlamaLikeConfig, read_decoder, refuse_fields, refuse_other_values
from llmconv.errors import MalformedInput, UnsupportedInput

FIELDS = {  # fields of Accessory's ModelArgs; any other field that a user gives belongs to `config.json`
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps"),
    *("rope_theta", "rope_scaling", "max_batch_size", "max_seq_len", "lora_rank", "bias_tuning", "norm_tuning"),
    *("prefix_layers", "prefix_len", "use_prefix_new_gate", "v_embed_dim", "v_depth", "v_num_heads", "v_mlp_ratio"),
    *("trainable_mode", "load_pretrained_visual_encoder", "hidden_dim", "head_dim", "moe", "load_balancing_weight"),
    *("num_layers", "hidden_size", "num_attention_heads", "mlp_ratio", "drop_rate", "layer_norm_epsilon", "norm_type"),
    *("use_scaled_init", "use_swiglu", "attention_dropout", "hidden_dropout", "bias", "multi_query", "parallel_attn"),
    *("new_decoder_architecture", "num_kv_heads", "use_scaled_rope"),
}

SIZES = {  # required fields of each family
    "llama": ("dim", "n_layers", "n_heads"),
    "mixtral": ("dim", "hidden_dim", "n_layers", "n_heads"),
    "internlm": ("hidden_size", "num_layers", "num_attention_heads"),
    "falcon": ("hidden_size", "num_layers", "num_attention_heads"),
}

POSITIVE_NUMBERS = (
    *("n_kv_heads", "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta", "max_seq_len", "mlp_ratio"),
    *("layer_norm_epsilon", "load_balancing_weight"),
)
INTEGERS = ("n_kv_heads", "multiple_of", "max_seq_len")
COUNT_LIMIT = 100_000  # more layers or experts than any model has, so that loops over them stay short


@dataclass(frozen=True)
class AccessoryParams:
    """The sizes of a model, by the same names for every family; Falcon's `kv_heads` depends on its weights instead."""

    family: str
    fields: Mapping[str, Any]
    dim: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int

    @property
    def head_dim(self) -> int:
        """Size of one head; upstream ignores the file's `head_dim` (`mixtral.py`, Attention)."""
        return self.dim // self.heads

    @property
    def copied(self) -> tuple[str, ...]:
        """Layers that every rank has whole: those of the only key and value head of a Falcon."""
        return ("wk", "wv") if self.family == "falcon" and self.fields.get("multi_query", True) else ()

    @property
    def experts(self) -> int:
        return int(_mixture(self.fields).get("num_experts", 8))


def _mixture(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return fields.get("moe") or {}


def read_params(content: Mapping[str, Any], family: str, source: str) -> AccessoryParams:
    """The sizes of a model of a family of `SIZES`; MalformedInput: invalid, UnsupportedInput: another norm or rope."""
    fields = dict(content)
    for name in SIZES[family]:
        if not _is_count(fields.get(name)):
            raise MalformedInput(
                f"`{source}` has no configuration with `{name}`",
                hint="give the files that training was given with `--llama_config`, each with `--config PATH`",
            )
    given = Fields(fields, source, hint="repair the configuration")
    if not all(map(_is_count, given.table("moe").values())):
        raise given.invalid("moe", fields["moe"], "numbers of experts")
    for name in (name for name in POSITIVE_NUMBERS if fields.get(name) is not None):
        given.number(name, least=0.5 if name in INTEGERS else 0)
    if fields.get("use_scaled_rope"):
        raise UnsupportedInput(
            f"`{source}` has `use_scaled_rope`, which upstream's code does not know", hint="is it Meta's own Llama 3.1?"
        )
    if family == "internlm" and fields.get("norm_type", "rmsnorm") != "rmsnorm":
        raise UnsupportedInput(
            f"`{source}` has `norm_type` {fields['norm_type']!r}",
            hint="transformers has no InternLM with other norms than `rmsnorm`",
        )
    dim, layers, heads = (int(fields[name]) for name in (*SIZES[family][:1], *SIZES[family][-2:]))
    kv_heads = int(fields.get("n_kv_heads") or heads)
    if dim % (2 * heads) or heads % kv_heads:
        raise MalformedInput(
            f"`{source}` has {heads} heads and {kv_heads} key/value heads for a size of {dim}",
            hint="the configuration belongs to another model",
        )
    if family == "llama":
        intermediate = intermediate_of(fields)
    elif family == "internlm":
        multiple = int(fields.get("multiple_of") or 256)
        intermediate = -(-int(dim * (fields.get("mlp_ratio") or 8 / 3)) // multiple) * multiple
    else:
        intermediate = int(fields["hidden_dim"]) if family == "mixtral" else 4 * dim
    return AccessoryParams(family, fields, dim, layers, heads, kv_heads, intermediate)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 < value <= COUNT_LIMIT


def to_config(params: AccessoryParams, vocabulary: int, source: str) -> dict[str, Any]:
    """The content of `config.json`, without dtype, biases, ids; `vocabulary`: rows of the embedding, as upstream."""
    # the trained length, if it is unknown: of Llama 1 (eps 1e-6), of Llama 2, or upstream's default
    usual = 4096 if params.family == "llama" and params.fields.get("norm_eps") != 1e-6 else 2048
    common = {
        "hidden_size": params.dim,
        "initializer_range": 0.02,
        "max_position_embeddings": int(params.fields.get("max_seq_len") or usual),
        "num_attention_heads": params.heads,
        "num_hidden_layers": params.layers,
        "rope_scaling": _rope_scaling(params.fields, source),
        "rope_theta": float(params.fields.get("rope_theta") or (1e6 if params.family == "mixtral" else 1e4)),
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocabulary,
    }
    return (_falcon(params) if params.family == "falcon" else _llama(params)) | common


def _llama(params: AccessoryParams) -> dict[str, Any]:
    eps = "layer_norm_epsilon" if params.family == "internlm" else "norm_eps"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": params.head_dim,
        "hidden_act": "silu",
        "intermediate_size": params.intermediate,
        "mlp_bias": False,
        "num_key_value_heads": params.kv_heads,
        "rms_norm_eps": params.fields.get(eps) or 1e-5,
    }
    if params.family != "mixtral":
        return config
    mixture = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": int(_mixture(params.fields).get("num_experts_per_tok", 2)),
        "num_local_experts": params.experts,
        "sliding_window": None,
    }
    return {name: value for name, value in config.items() if not name.endswith("_bias")} | mixture


def _falcon(params: AccessoryParams) -> dict[str, Any]:
    # Accessory ignores `num_kv_heads`: with `multi_query` there is one key/value head, otherwise one per head
    # (`falcon.py`, FalconAttention)
    newer, multi_query = (bool(params.fields.get(name, True)) for name in ("new_decoder_architecture", "multi_query"))
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "activation": "gelu",
        "alibi": False,
        "attention_dropout": 0.0,
        "bias": bool(params.fields.get("bias")),
        "ffn_hidden_size": params.intermediate,
        "hidden_dropout": 0.0,
        "layer_norm_epsilon": params.fields.get("layer_norm_epsilon") or 1e-5,
        "multi_query": multi_query,
        "new_decoder_architecture": newer,
        "num_kv_heads": 1 if multi_query else params.heads,
        "num_ln_in_parallel_attn": 2 if newer else None,
        "parallel_attn": newer or bool(params.fields.get("parallel_attn", True)),
    }


def _rope_scaling(fields: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """Accessory multiplies positions by it (`llama.py`, precompute_freqs_cis), transformers divides by `factor`."""
    if fields.get("rope_scaling") is None:
        return None
    factor = Fields(fields, source, hint="it should be a number such as 0.5").number("rope_scaling", least=1e-15)
    return {"rope_type": "linear", "factor": 1.0 / factor}


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
    """Accessory's description of a model."""

    plugin: str  # the `llama_type` of `meta.json`
    params: AccessoryParams  # the sizes; its `fields` are the content of `config.json`
    shared: Mapping[str, int]  # name to size of everything that is divided among ranks
    # linear layers with a bias that the table of names lacks, by the last component of Hugging Face's names
    biases: tuple[str, ...] = ()


def args_of(checkpoint: Checkpoint) -> AccessoryArgs:
    """The plugin and arguments; UnsupportedInput, listing fields, if there is none, MalformedInput: invalid sizes."""
    plugin = checkpoint.config.get("model_type")
    decoder = read_decoder(_like_a_llama(checkpoint) if plugin == "falcon" else checkpoint)
    refuse_fields(decoder, SUPPORTED if plugin == "llama" else SUPPORTED | NO_BIASES, CODE)
    fields = _fields(decoder)
    biases = tuple(layer for switch, layers in SWITCHES.items() if decoder.fields.get(switch) for layer in layers)
    if biases:
        plugin, fields = "llama_peft", fields | {"lora_rank": -1, "bias_tuning": True, "norm_tuning": True}
    params = read_params(fields, decoder.model_type, decoder.source)
    settings = to_config(params, decoder.vocabulary, decoder.source)
    # refuses values that upstream's code would compute differently, since it has no fields for them
    read_back = {"head_dim": params.head_dim, "intermediate_size": params.intermediate, "rope": {}}
    if settings["rope_scaling"]:  # the last bit of the division may differ
        read_back["rope"] = {**settings["rope_scaling"], "factor": decoder.scaling.get("factor")}
    own = {"head_dim": decoder.head_dim, "intermediate_size": decoder.intermediate, "rope": dict(decoder.scaling)}
    if params.family == "falcon":
        norms = "num_ln_in_parallel_attn"
        read_back |= {"num_kv_heads": settings["num_kv_heads"], norms: settings[norms]}
        own |= {"num_kv_heads": decoder.kv_heads, norms: decoder.fields.get(norms) or settings[norms]}
    refuse_other_values(decoder, own, read_back, CODE)
    return AccessoryArgs(str(plugin), params, _shared(decoder, params), biases)


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


FALCON_LINEAR = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")

INTERNLM = {  # InternLM's names for a Llama's layers; its w2 is the up projection, its w3 the down projection
    "embedding": "tok_embeddings",
    "mixer.out_proj": "attention.wo",
    "norm1": "attention_norm",
    "norm2": "ffn_norm",
    "mlp.w1": "feed_forward.w1",
    "mlp.w2": "feed_forward.w3",
    "mlp.w3": "feed_forward.w2",
    "head": "output",
}

LINEAR = re.compile(r"\.(wq|wk|wv|wo|w1|w2|w3)$")
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
SWITCHES = {"attention_bias": ATTENTION, "mlp_bias": MLP}  # fields of transformers' Llama that give layers biases


def table_of(params: AccessoryParams) -> dict[str, str | None]:
    """Accessory's names to Hugging Face's; biases of linear layers are included for Falcon only."""
    if params.family == "falcon":
        newer, parallel = (params.fields.get(name, True) for name in ("new_decoder_architecture", "parallel_attn"))
        norms = ["ln_attn", "ln_mlp"] if newer else ["input_layernorm"]
        norms += [] if newer or parallel else ["post_attention_layernorm"]
        names = [f"{norm}.{kind}" for norm in norms for kind in ("weight", "bias")]
        names += [f"{layer}.weight" for layer in FALCON_LINEAR]
        names += [f"{layer}.bias" for layer in FALCON_LINEAR] if params.fields.get("bias") else []
        ends = {name: f"transformer.{name}" for name in ("word_embeddings.weight", "ln_f.weight", "ln_f.bias")}
        layers = {f"layers.{{}}.{name}": f"transformer.h.{{}}.{name}" for name in names}
        return {**ends, **layers, "output.weight": "lm_head.weight"}
    if params.family != "mixtral":
        return LLAMA
    kept = {name: target for name, target in LLAMA.items() if ".feed_forward." not in name}
    source, moe = "layers.{}.feed_forward.", "model.layers.{}.block_sparse_moe."
    experts = [f"experts.{number}.{layer}.weight" for number in range(params.experts) for layer in ("w1", "w2", "w3")]
    return kept | {source + name: moe + name for name in ["gate.weight", *experts]}


def has_biases(tensors: Iterable[str], layers: Iterable[str]) -> bool:
    endings = tuple(f".{layer}.bias" for layer in layers)
    return any(name.endswith(endings) for name in tensors)
