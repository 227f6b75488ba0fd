"""`params.json` of a Llama, the reverse of `config.py` and checked against it."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor
from typing import Any

from llmconv.convert.formats.meta.config import SMALL_DIMS, WeightSizes, intermediate_of, to_config
from llmconv.convert.models.model_config import LlamaLikeConfig
from llmconv.convert.models.unsupported_settings import refuse_fields, refuse_other_values

CODE = "Meta's code"
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (),
    "mlp_bias": (),
    "sliding_window": (),
}
MULTIPLES = (4096, 1024, 256, 64, 16, 1)
DIGITS = 17


def params_of(decoder: LlamaLikeConfig, shards: int) -> dict[str, Any]:
    """The fields of `params.json` that Meta's code of this generation has; it refuses any others.

    Args:
        decoder: the model.
        shards: number of ranks; if there are fewer key/value heads, Meta counts every copy of a head.

    Raises:
        UnsupportedInput: Meta's code cannot express the model; lists the fields.
    """
    refuse_fields(decoder, SUPPORTED, CODE)
    params: dict[str, Any] = {
        "dim": decoder.hidden,
        "n_layers": decoder.layers,
        "n_heads": decoder.heads,
        **({"n_kv_heads": max(decoder.kv_heads, shards)} if decoder.kv_heads != decoder.heads else {}),
        "vocab_size": decoder.vocabulary,
        **feed_forward_of(decoder.hidden, decoder.intermediate),
        "norm_eps": decoder.eps,
        **({"rope_theta": decoder.theta} if decoder.theta != 10000.0 else {}),
        **_scaling(decoder),
    }
    back = config_of(params, decoder)
    own = {"head_dim": decoder.head_dim, "rope_scaling": dict(decoder.scaling) or None}
    refuse_other_values(decoder, own, back, CODE)
    return params


def config_of(params: Mapping[str, Any], decoder: LlamaLikeConfig) -> dict[str, Any]:
    """The `config.json` that `to-hf` makes of `params.json`."""
    return to_config(params, WeightSizes(decoder.vocabulary, decoder.intermediate, decoder.kv_heads), decoder.source)


def _scaling(decoder: LlamaLikeConfig) -> dict[str, Any]:
    """Llama 3.1's rope scaling, without factors that are the defaults of Meta's code (8 and 4)."""
    if decoder.scaling.get("rope_type") != "llama3":
        return {}
    params: dict[str, Any] = {"use_scaled_rope": True}
    factor, high = (decoder.scaling.get(name) for name in ("factor", "high_freq_factor"))
    if factor != 8 or decoder.hidden in SMALL_DIMS:
        params["rope_scaling_factor"] = factor
    return params | ({"rope_high_freq_factor": high} if high != 4 else {})


def feed_forward_of(dim: int, intermediate: int) -> dict[str, Any]:
    """`multiple_of`, and `ffn_dim_multiplier` if needed, that result in exactly `intermediate`.

    The multiplier has as few digits, and the multiple is as large, as possible, as in Meta's own files.
    """
    candidates: list[dict[str, Any]] = [{"multiple_of": 256}]
    base = int(2 * (4 * dim) / 3)
    for digits in range(1, DIGITS):
        ratio = floor(intermediate / base * 10**digits) / 10**digits
        candidates += [{"multiple_of": multiple, "ffn_dim_multiplier": ratio} for multiple in MULTIPLES]
    candidates.append({"multiple_of": 1, "ffn_dim_multiplier": (intermediate + 0.5) / base})
    return next(found for found in candidates if intermediate_of({"dim": dim, **found}) == intermediate)
