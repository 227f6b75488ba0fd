"""Meta's `params.json` as the config of a Llama, every size checked against the shapes of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
"""More than any size or frequency of a model."""

SMALL_DIMS = (2048, 3072)
"""Hidden sizes of Llama 3.2 1B and 3B."""


@dataclass(frozen=True)
class WeightSizes:
    """What the shapes of the weights say."""

    vocabulary: int
    intermediate: int
    kv_heads: int


def read_params(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of `params.json`, taken out of `model` where they are nested.

    Raises:
        MalformedInput: a field that no model can do without is missing, or one is not a positive number.
    """
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
                f"`params.json` of `{source}` has the {name} {str(params[name])[:40]!r}",
                hint="it should be a positive number; repair the file, or give the right one with `--config PATH`",
            )
    if params["dim"] % params["n_heads"]:
        raise MalformedInput(
            f"`params.json` of `{source}` has {params['n_heads']} heads, which do not divide `dim` {params['dim']}",
            hint="it belongs to another model; give the right one with `--config PATH`",
        )
    return params


def _is_positive(value: Any, *, whole: bool) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < NUMBER_LIMIT and (not whole or value == int(value))


def is_scaled(params: Mapping[str, Any]) -> bool:
    """Whether the model is a Llama 3.1 or later (its rope is stretched)."""
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
    """config.json of a Llama, without dtype and token ids.

    Raises:
        MalformedInput: `params.json` and the weights disagree.
    """
    expected = intermediate_of(params)
    if expected != sizes.intermediate:
        raise MalformedInput(
            f"`params.json` of `{source}` gives the feed-forward layers {expected} rows, the shards have "
            f"{sizes.intermediate}",
            hint="a shard is missing or there is one too many, or `params.json` belongs to another model",
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
    """Llama 3.1 stretches 8 times; 3.2 (told by its size) 32 times, though `params.json` does not say so."""
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
