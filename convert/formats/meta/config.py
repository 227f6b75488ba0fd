"""Meta's `params.json` as a Llama's `config.json`; every size is checked against the shapes of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from typing import Any

from llmconv.convert.models.model_config import LlamaLikeConfig, refuse_fields, refuse_other_values
from llmconv.errors import MalformedInput

PARAMS = {
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "multiple_of",
    "ffn_dim_multiplier",
    "norm_eps",
    "rope_theta",
    "use_scaled_rope",
    "rope_scaling_factor",
    "rope_high_freq_factor",
    "max_batch_size",
    "max_seq_len",
    "model",
}
"""Fields of `params.json`; any other field that a user gives belongs to `config.json`."""

COUNTS = ("dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of")
NUMBERS = ("norm_eps", "ffn_dim_multiplier", "rope_theta", "rope_scaling_factor", "rope_high_freq_factor")
REQUIRED = ("dim", "n_layers", "n_heads", "norm_eps")
NUMBER_LIMIT = 1e12
"""Larger than any size or frequency of a model."""

SMALL_DIMS = (2048, 3072)
"""Hidden sizes of Llama 3.2 1B and 3B."""


@dataclass(frozen=True)
class WeightSizes:
    """Sizes from the shapes of the weights."""

    vocabulary: int
    intermediate: int
    kv_heads: int


def read_params(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of `params.json`, also if nested in `model`; MalformedInput if one is missing or not positive."""
    params = dict(content["model"]) if isinstance(content.get("model"), Mapping) else dict(content)
    for name in REQUIRED:
        if not params.get(name):
            raise MalformedInput(
                f"`{source}` has no `params.json` with `{name}`",
                hint="copy `params.json` next to the shards, or give it with `--config PATH`",
            )
    for name in (*COUNTS, *NUMBERS):
        if params.get(name) and not _is_positive(params[name], whole=name in COUNTS):
            raise MalformedInput(
                f"`{name}` in `params.json` of `{source}` is invalid: {str(params[name])[:40]!r}",
                hint="it should be a positive number; repair the file, or give the right one with `--config PATH`",
            )
    if params["dim"] % params["n_heads"]:
        raise MalformedInput(
            f"`dim` {params['dim']} in `params.json` of `{source}` is not a multiple of `n_heads` {params['n_heads']}",
            hint="it belongs to another model; give the right one with `--config PATH`",
        )
    return params


def _is_positive(value: Any, *, whole: bool) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < NUMBER_LIMIT and (not whole or value == int(value))


def is_scaled(params: Mapping[str, Any]) -> bool:
    """Whether the model is a Llama 3.1 or later (with scaled rotary positions)."""
    return bool(params.get("use_scaled_rope"))


def kv_heads_of(params: Mapping[str, Any]) -> int:
    """`n_kv_heads`; absent or null means one per head."""
    return int(params.get("n_kv_heads") or params["n_heads"])


def intermediate_of(params: Mapping[str, Any]) -> int:
    """Rows of w1 over all shards (meta-llama/llama `model.py`, FeedForward; llama-models the same).

    `int(2 * 4 * dim / 3)`, times `ffn_dim_multiplier` rounded down, rounded up to a multiple of `multiple_of`.
    """
    hidden = int(2 * (4 * int(params["dim"])) / 3)
    if params.get("ffn_dim_multiplier"):
        hidden = int(params["ffn_dim_multiplier"] * hidden)
    multiple = int(params.get("multiple_of") or 256)
    return -(-hidden // multiple) * multiple


def to_config(params: Mapping[str, Any], sizes: WeightSizes, source: str) -> dict[str, Any]:
    """The content of a Llama's `config.json`, without dtype and token ids; MalformedInput if weights contradict it."""
    expected = intermediate_of(params)
    if expected != sizes.intermediate:
        raise MalformedInput(
            f"shape mismatch for the feed-forward layers of `{source}`: expected {expected} rows from `params.json`, "
            f"got {sizes.intermediate}",
            hint="a shard is missing or superfluous, or `params.json` belongs to another model",
        )
    dim, heads = int(params["dim"]), int(params["n_heads"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": dim // heads,
        "hidden_act": "silu",
        "hidden_size": dim,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": _max_positions(params),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(params["n_layers"]),
        "num_key_value_heads": sizes.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": params["norm_eps"],
        "rope_scaling": _rope_scaling(params),
        "rope_theta": float(params.get("rope_theta") or 10000.0),
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": sizes.vocabulary,
    }


def _max_positions(params: Mapping[str, Any]) -> int:
    """Trained length by generation: Llama 3.1+ 131072, Code Llama 16384, 3 8192, 2 4096, 1 (eps 1e-6) 2048."""
    theta = float(params.get("rope_theta") or 10000.0)
    if is_scaled(params):
        return 131072
    if theta == 1e6:
        return 16384
    if theta == 5e5:
        return 8192
    return 2048 if params["norm_eps"] == 1e-6 else 4096


def _rope_scaling(params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Factor 8 for Llama 3.1, and 32 for 3.2, which `params.json` does not contain: 3.2 is detected by its size."""
    if not is_scaled(params):
        return None
    usual = 32.0 if params["dim"] in SMALL_DIMS else 8.0
    return {
        "rope_type": "llama3",
        "factor": float(params.get("rope_scaling_factor") or usual),
        "low_freq_factor": 1.0,
        "high_freq_factor": float(params.get("rope_high_freq_factor") or 4.0),
        "original_max_position_embeddings": 8192,
    }


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
    """The fields of `params.json` that Meta's code of this generation has; it refuses any others (UnsupportedInput).

    With more ranks than key/value heads, Meta counts every copy of a head.
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

    As in Meta's own files, the multiplier has as few digits, and the multiple is as large, as possible.
    """
    candidates: list[dict[str, Any]] = [{"multiple_of": 256}]
    base = int(2 * (4 * dim) / 3)
    for digits in range(1, DIGITS):
        ratio = floor(intermediate / base * 10**digits) / 10**digits
        candidates += [{"multiple_of": multiple, "ffn_dim_multiplier": ratio} for multiple in MULTIPLES]
    candidates.append({"multiple_of": 1, "ffn_dim_multiplier": (intermediate + 0.5) / base})
    return next(found for found in candidates if intermediate_of({"dim": dim, **found}) == intermediate)
