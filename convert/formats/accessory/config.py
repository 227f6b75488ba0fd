"""LLaMA2-Accessory's `config.json` or `params.json` (its ModelArgs) as the `config.json` of a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmconv.convert.formats.meta.config import intermediate_of
from llmconv.errors import MalformedInput, UnsupportedInput

FIELDS = {
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps"),
    *("rope_theta", "rope_scaling", "max_batch_size", "max_seq_len", "lora_rank", "bias_tuning", "norm_tuning"),
    *("prefix_layers", "prefix_len", "use_prefix_new_gate", "v_embed_dim", "v_depth", "v_num_heads", "v_mlp_ratio"),
    *("trainable_mode", "load_pretrained_visual_encoder", "hidden_dim", "head_dim", "moe", "load_balancing_weight"),
    *("num_layers", "hidden_size", "num_attention_heads", "mlp_ratio", "drop_rate", "layer_norm_epsilon", "norm_type"),
    *("use_scaled_init", "use_swiglu", "attention_dropout", "hidden_dropout", "bias", "multi_query", "parallel_attn"),
    *("new_decoder_architecture", "num_kv_heads", "use_scaled_rope"),
}
"""Fields of Accessory's ModelArgs; any other field that a user gives belongs to `config.json`."""

SIZES = {
    "llama": ("dim", "n_layers", "n_heads"),
    "mixtral": ("dim", "hidden_dim", "n_layers", "n_heads"),
    "internlm": ("hidden_size", "num_layers", "num_attention_heads"),
    "falcon": ("hidden_size", "num_layers", "num_attention_heads"),
}
"""Required fields of each family."""

POSITIVE_NUMBERS = (
    *("n_kv_heads", "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta", "max_seq_len", "mlp_ratio"),
    *("layer_norm_epsilon", "load_balancing_weight"),
)
INTEGERS = ("n_kv_heads", "multiple_of", "max_seq_len")
COUNT_LIMIT = 100_000
"""More layers or experts than any model has, so that loops over them stay short."""
NUMBER_LIMIT = 1e15


@dataclass(frozen=True)
class AccessoryParams:
    """The sizes of a model, under the same names for every family.

    Attributes:
        family: `llama`, `mixtral`, `internlm` or `falcon`.
        fields: the content of the file.
        dim: hidden size.
        layers, heads: their numbers.
        kv_heads: number of key/value heads; Falcon's depends on its weights instead.
        intermediate: size of the feed-forward.
    """

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
    def experts(self) -> int:
        """Number of experts of a Mixtral."""
        return int(_mixture(self.fields).get("num_experts", 8))


def _mixture(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return fields.get("moe") or {}


def is_field(name: str, value: Any) -> bool:
    """Whether a field that the user gives is Accessory's; `rope_scaling` is, unless it is Hugging Face's object."""
    return name in FIELDS and not (name == "rope_scaling" and isinstance(value, Mapping))


def read_params(content: Mapping[str, Any], family: str, source: str) -> AccessoryParams:
    """The sizes of a model of `family`.

    Args:
        content: the fields of the configuration.
        family: a key of `SIZES`.
        source: name of the checkpoint's folder, for error messages.

    Raises:
        MalformedInput: a size is missing or invalid, or the sizes contradict each other.
        UnsupportedInput: upstream's code or transformers does not have the kind of norm or rope.
    """
    fields = dict(content)
    for name in SIZES[family]:
        if not _is_count(fields.get(name)):
            raise MalformedInput(
                f"`{source}` has no configuration with `{name}`",
                hint="give the files that training was given with `--llama_config`, each with `--config PATH`",
            )
    _check_numbers(fields, source)
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
    return AccessoryParams(family, fields, dim, layers, heads, kv_heads, _intermediate(family, fields))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 < value <= COUNT_LIMIT


def _check_numbers(fields: Mapping[str, Any], source: str) -> None:
    mixture = _mixture(fields)
    if not isinstance(mixture, Mapping) or not all(map(_is_count, mixture.values())):
        raise MalformedInput(
            f"`moe` of `{source}` is invalid: {mixture!r}", hint="it counts experts; repair the configuration"
        )
    for name in POSITIVE_NUMBERS:
        value = fields.get(name)
        least = 1 if name in INTEGERS else 1 / NUMBER_LIMIT
        if value is not None and (not isinstance(value, int | float) or not least <= value < NUMBER_LIMIT):
            raise MalformedInput(
                f"`{name}` of `{source}` is invalid: {value!r}",
                hint="it should be a positive number; repair the configuration",
            )


def _intermediate(family: str, fields: Mapping[str, Any]) -> int:
    if family == "llama":
        return intermediate_of(fields)
    if family == "mixtral":
        return int(fields["hidden_dim"])
    if family == "falcon":
        return 4 * int(fields["hidden_size"])
    multiple = int(fields.get("multiple_of") or 256)
    return -(-int(fields["hidden_size"] * (fields.get("mlp_ratio") or 8 / 3)) // multiple) * multiple


def to_config(params: AccessoryParams, vocabulary: int, source: str) -> dict[str, Any]:
    """The content of `config.json`, without dtype, biases and token ids.

    Args:
        params: the sizes.
        vocabulary: number of rows of the embedding; as upstream, the file's own value is ignored.
        source: name of the checkpoint's folder, for error messages.

    Raises:
        MalformedInput: the rope scaling is not a positive number.
    """
    common = {
        "hidden_size": params.dim,
        "initializer_range": 0.02,
        "max_position_embeddings": _max_positions(params),
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


def _max_positions(params: AccessoryParams) -> int:
    """The trained length; if it is unknown, that of Llama 1 (eps 1e-6), of Llama 2, or upstream's default."""
    if stated := params.fields.get("max_seq_len"):
        return int(stated)
    return 4096 if params.family == "llama" and params.fields.get("norm_eps") != 1e-6 else 2048


def _rope_scaling(fields: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """Accessory multiplies positions by it (`llama.py`, precompute_freqs_cis), transformers divides by `factor`."""
    value = fields.get("rope_scaling")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / NUMBER_LIMIT < value < NUMBER_LIMIT:
        raise MalformedInput(
            f"`rope_scaling` of `{source}` is invalid: {value!r}", hint="it should be a number such as 0.5"
        )
    return {"rope_type": "linear", "factor": 1.0 / value}
