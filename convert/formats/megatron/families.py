"""Which model of transformers the arguments of a Megatron run describe.

A family is one row: what its model has, in Megatron's terms. Everything else about it is in `config` and `names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmconv.convert.formats.megatron.arguments import Arguments
from llmconv.errors import UnsupportedInput, listing


@dataclass(frozen=True)
class Family:
    """The parts that distinguish a model.

    Attributes:
        model_type: of transformers.
        rope: rotary positions; else a learned table.
        rms: RMSNorm; else LayerNorm.
        gated: the feed-forward is gated with SiLU; else it has a GELU.
        bias: every linear layer has a bias.
        qkv_bias: queries, keys and values have a bias.
        qk_norm: queries and keys are normalized.
        experts: the feed-forward is a mixture of experts.
        shared: with one expert for all tokens, behind a gate.
        window: attention may be limited to a window; `None`: it must not be.
    """

    model_type: str
    rope: bool = True
    rms: bool = True
    gated: bool = True
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    shared: bool = False
    window: bool = False


FAMILIES = (
    Family("llama"),
    Family("llama", bias=True, qkv_bias=True),
    Family("mistral", window=True),
    Family("qwen2", qkv_bias=True),
    Family("qwen3", qk_norm=True),
    Family("mixtral", experts=True, window=True),
    Family("qwen2_moe", qkv_bias=True, experts=True, shared=True),
    Family("qwen3_moe", qk_norm=True, experts=True),
    Family("gpt_neox", rms=False, gated=False, bias=True, qkv_bias=True),
    Family("gpt2", rope=False, rms=False, gated=False, bias=True, qkv_bias=True),
)
"""In this order; the first that fits is taken unless `--config` names another."""

POSITIONS = ("learned_absolute", "rope")
NORMS = {"layernorm": False, "rmsnorm": True, "layernorm1p": False}


def family_of(arguments: Arguments, wanted: str | None) -> Family:
    """The family of a run.

    Args:
        arguments: of the run.
        wanted: the `model_type` that the user gives, which must be one of those that fit.

    Raises:
        UnsupportedInput: none fits, or not the one that is wanted.
        MalformedInput: an argument has the wrong type.
    """
    parts = _parts(arguments)
    fitting = [family for family in FAMILIES if _fits(family, parts)]
    chosen = [family for family in fitting if wanted in (None, family.model_type)]
    if chosen:
        return chosen[0]
    if fitting:
        raise UnsupportedInput(
            f"the arguments of `{arguments.source}` describe a {fitting[0].model_type}, `--config` a {wanted}",
            hint=f"`model_type` may be {' or '.join(family.model_type for family in fitting)}",
        )
    raise UnsupportedInput(
        f"no supported model has what `{arguments.source}` was trained with: {listing(_described(parts))}",
        hint="convert it with Megatron Bridge, which builds the model with Megatron's own code",
    )


def _parts(arguments: Arguments) -> dict[str, Any]:
    """The attributes of a Family, from the arguments."""
    bias = has_bias(arguments)
    return {
        "rope": position_kind(arguments) == "rope",
        "rms": norm_kind(arguments),
        "gated": arguments.flag("swiglu"),
        "bias": bias,
        "qkv_bias": bias or arguments.flag("add_qkv_bias"),
        "qk_norm": arguments.flag("qk_layernorm"),
        "experts": bool(arguments.values.get("num_experts")),
        "shared": bool(arguments.values.get("moe_shared_expert_intermediate_size")),
        "window": window_of(arguments) is not None,
    }


def _fits(family: Family, parts: Mapping[str, Any]) -> bool:
    exact = all(getattr(family, name) == value for name, value in parts.items() if name != "window")
    return exact and (family.window or not parts["window"])


def _described(parts: Mapping[str, Any]) -> list[str]:
    words = {
        "rope": ("rotary positions", "learned positions"),
        "rms": ("RMSNorm", "LayerNorm"),
        "gated": ("a gated feed-forward", "a GELU"),
        "bias": ("biases", "no biases"),
        "qkv_bias": ("biases of queries, keys and values", ""),
        "qk_norm": ("norms of queries and keys", ""),
        "experts": ("experts", ""),
        "shared": ("a shared expert", ""),
        "window": ("a window", ""),
    }
    found = [words[name][0 if value else 1] for name, value in parts.items()]
    return [word for word in found if word]


def has_bias(arguments: Arguments) -> bool:
    """Whether every linear layer has a bias: Megatron's default, under the names of both ages."""
    if "add_bias_linear" in arguments.values:
        return arguments.flag("add_bias_linear")
    return not arguments.flag("disable_bias_linear")


def position_kind(arguments: Arguments) -> str:
    """`rope` or `learned_absolute`; before core 0.5 two flags decided it.

    Raises:
        UnsupportedInput: another kind of positions.
    """
    if arguments.flag("use_rotary_position_embeddings"):
        return "rope"
    kind = arguments.word("position_embedding_type", POSITIONS[0])
    if kind not in POSITIONS:
        raise arguments.unsupported("position_embedding_type")
    if kind == POSITIONS[0] and not arguments.flag("add_position_embedding", default=True):
        raise arguments.unsupported("add_position_embedding")
    return kind


def norm_kind(arguments: Arguments) -> bool:
    """Whether the norms are RMSNorm.

    Raises:
        UnsupportedInput: neither that nor LayerNorm.
    """
    kind = arguments.word("normalization", "LayerNorm").lower()
    if kind not in NORMS:
        raise arguments.unsupported("normalization")
    return NORMS[kind]


def window_of(arguments: Arguments) -> int | None:
    """The number of tokens that a token sees, itself included; None where it sees all.

    Megatron's pair counts the tokens before and after it (`core/transformer/utils.py`, `window` masks).

    Raises:
        MalformedInput: not a pair of numbers.
        UnsupportedInput: tokens would see later ones.
    """
    value = arguments.values.get("window_size")
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2 or any(type(side) is not int for side in value):
        raise arguments.invalid("window_size", value, "a pair of numbers")
    before, after = value
    if after not in (0, -1) or before < -1:
        raise arguments.unsupported("window_size")
    return None if before == -1 else before + 1
