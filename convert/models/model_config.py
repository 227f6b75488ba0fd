"""The settings of a `config.json` that change a logit, under the same names for any transformers version.

Each has its default. A format can hold a model if the config that `to-hf` makes of the written checkpoint has equal
settings. Names and defaults: transformers' `configuration_*.py`; transformers 5 writes `rope_parameters`, transformers
4 `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.fields import Fields
from llmconv.convert.models.head_and_dtype import settle_head
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem, listing

# Names of sizes in models that are not like Llama (GPT-2, Bloom, MPT, OPT)
OTHER_SIZES = {"n_head", "n_heads", "n_embd", "d_model"}
ALIASES = {  # names of GPT-2 and BLOOM for fields of the others
    "n_embed": "hidden_size",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}

WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
PARTIAL = "partial_rotary_factor"
FLAGS = {"hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
ROTARY = {**FLAGS, "rms_norm_eps": 1e-6}
LLAMA: dict[str, Any] = {**ROTARY, "max_position_embeddings": 2048}
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
BLOOM = {"layer_norm_epsilon": 1e-5, "apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True}
DEFAULTS: dict[str, dict[str, Any]] = {  # by `model_type`, what transformers takes for a field that is not there
    "llama": LLAMA,
    "mistral": {**ROTARY, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**ROTARY, **WINDOW, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {**ROTARY, **WINDOW, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "glm": {**ROTARY, **GLM},
    "gpt2": GPT2,
    "bloom": BLOOM,
}

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The fields of the models without rotary positions
ABSOLUTE: dict[str, tuple[str, ...]] = {"gpt2": (*SIZES, *GPT2), "bloom": (*SIZES[:2], *SIZES[3:], *BLOOM)}
ModelSettings = Mapping[str, Any]


@dataclass(frozen=True)
class LlamaLikeConfig:
    """The sizes and rotary positions of a model."""

    source: str
    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    eps: float
    theta: float  # base of the rotary frequencies
    # of the rotary frequencies, with `rope_type`; empty without scaling
    scaling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)  # the whole config


def read_decoder(checkpoint: Checkpoint) -> LlamaLikeConfig:
    """The model of a Hugging Face folder; UnsupportedInput if it is not like Llama, MalformedInput for bad sizes."""
    fields, source = checkpoint.config, checkpoint.path.name
    if not isinstance(fields.get("model_type"), str):
        raise MalformedInput(
            f"`config.json` of `{source}` does not contain a `model_type`", hint="repair it; copy it again"
        )
    if OTHER_SIZES & fields.keys() and not {"hidden_size", "num_attention_heads"} <= fields.keys():
        raise UnsupportedInput(
            f"`{source}` is a `{fields['model_type'][:40]}`, and this format holds only models like Llama",
            hint="choose another `--to`, or keep the Hugging Face folder",
        )
    own = _fields(fields, source)
    hidden, heads = own.count("hidden_size"), own.count("num_attention_heads")
    kv_heads = own.count("num_key_value_heads", default=heads)
    head_dim = own.count("head_dim", default=max(1, hidden // heads))
    if heads % kv_heads or head_dim % 2 or ("head_dim" not in fields and hidden % heads):
        raise MalformedInput(
            f"`{source}` has {heads} heads and {kv_heads} key/value heads for a size of {hidden}",
            hint="repair its `config.json`; copy the folder again",
        )
    theta, scaling = _rope(fields, source)
    return LlamaLikeConfig(
        source,
        fields["model_type"],
        hidden,
        own.count("intermediate_size"),
        own.count("num_hidden_layers"),
        heads,
        kv_heads,
        head_dim,
        own.count("vocab_size"),
        own.count("max_position_embeddings", default=LLAMA["max_position_embeddings"]),
        own.number("rms_norm_eps", default=LLAMA["rms_norm_eps"]),
        theta,
        scaling,
        fields,
    )


def _fields(config: Mapping[str, Any], source: str) -> Fields:
    return Fields(config, source, "in `config.json` of `{}`", "repair it; it should be a positive number")


def rope_settings(config: Mapping[str, Any]) -> Any:
    """The rotary settings that count, not checked; {} for none.

    Where a configuration has both, `rope_scaling` replaces all of `rope_parameters`, as transformers 4 and 5 read it
    (`modeling_rope_utils.py`): users add it to a file of transformers 5 to extend the context.
    """
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings that a configuration states, to compare those that two state.

    `rope_type` is always there, since its absence is `default`; with settings for each kind of layers, only these are.
    """
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config
    stored = rope_settings(fields)
    stored = stored if isinstance(stored, Mapping) else {}
    if any(isinstance(one, Mapping) for one in stored.values()):  # by kind of layer, which only transformers 5 has
        return {name: one for name, one in stored.items() if isinstance(one, Mapping)}
    theta = {"rope_theta": fields["rope_theta"]} if fields.get("rope_theta") is not None else {}
    kind = stored.get("rope_type") or stored.get("type") or "default"
    others = {name: one for name, one in stored.items() if name not in ("type", "rope_type")}
    return {"rope_type": kind, **theta, **others}


def _rope(fields: Mapping[str, Any], source: str) -> tuple[float, dict[str, Any]]:
    """Base, and what scales the frequencies (`rope_type` in front), whichever transformers wrote it."""
    stored = rope_settings(fields)
    if not isinstance(stored, Mapping):
        raise MalformedInput(f"the rope settings of `{source}` are {stored!r}", hint="repair its `config.json`")
    scaling = {name: value for name, value in stored.items() if name not in ("type", "rope_type", "rope_theta")}
    if scaling.get("partial_rotary_factor") == 1:
        del scaling["partial_rotary_factor"]
    kind = stored.get("rope_type", stored.get("type", "default"))
    if not isinstance(kind, str | None):
        raise MalformedInput(f"the rope settings of `{source}` have the type {kind!r}", hint="repair its `config.json`")
    theta = _fields({**fields, **stored}, source).number("rope_theta", default=10000.0)
    return theta, ({} if kind == "default" and not scaling else {"rope_type": kind, **scaling})


def settings_of(checkpoint: Checkpoint, held: Collection[str] = DEFAULTS.keys()) -> dict[str, Any]:
    """The settings of a model of a `held` type; UnsupportedInput for another one, MalformedInput for invalid sizes."""
    kind = str(checkpoint.config.get("model_type"))
    if kind not in DEFAULTS.keys() & held:
        raise UnsupportedInput(
            f"`{checkpoint.path.name}` is a `{kind}`, which this format cannot hold",
            hint=f"models of these types can be written: {', '.join(held)}",
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
    rope = rope_settings(fields)
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


def tied(checkpoint: Checkpoint, held: Collection[str]) -> Checkpoint:
    """The checkpoint with `tie_word_embeddings` set, without a head that is the embedding; errors as `settings_of`."""
    tensors = dict(checkpoint.tensors)
    config = {**checkpoint.config, "tie_word_embeddings": settings_of(checkpoint, held)["tie_word_embeddings"]}
    return replace(checkpoint, config=settle_head(tensors, config, []), tensors=tensors)


SHARD_LIMIT = 256
FITS_SHOWN = 12
OFF = (None, False, 0)  # values that switch a field off


def refuse_fields(decoder: LlamaLikeConfig, held: Mapping[str, tuple[Any, ...]], what: str) -> None:
    """UnsupportedInput, listing fields with values that `what` cannot hold; `held`: values by field, or off."""
    odd = {
        name: decoder.fields[name]
        for name, values in held.items()
        if decoder.fields.get(name) not in OFF and decoder.fields[name] not in values
    }
    refuse(decoder.source, odd, what)


def refuse_other_values(decoder: LlamaLikeConfig, own: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
    """Raises UnsupportedInput, with a list, if a model's values (`other`) are not those of the format (`own`)."""
    refuse(decoder.source, {name: value for name, value in own.items() if value != other[name]}, what)


def refuse_other_settings(checkpoint: Checkpoint, back: Mapping[str, Any], what: str) -> None:
    """UnsupportedInput, listing fields that would come back otherwise; `back`: the `config.json` of `to-hf`."""
    own, other = settings_of(checkpoint), settings_of(replace(checkpoint, config=dict(back)))
    refuse(checkpoint.path.name, {name: value for name, value in own.items() if other.get(name) != value}, what)


def refuse_settings(source: str, settings: ModelSettings, held: ModelSettings, what: str) -> None:
    """Raises UnsupportedInput, with a list, if settings differ from `held`, the only values that `what` can hold."""
    odd = {name: settings[name] for name, value in held.items() if settings.get(name, value) != value}
    refuse(source, odd, what)


def refuse(source: str, odd: ModelSettings, what: str) -> None:
    """Raises UnsupportedInput if there are settings (`odd`, which it lists) that the format `what` cannot hold."""
    if odd:
        raise UnsupportedInput(
            f"`{source}` has what {what} cannot hold: {listing([f'{name} {value}' for name, value in odd.items()])}",
            hint="choose another `--to`, or keep the Hugging Face folder",
        )


def refuse_shards(source: str, shards: int, sizes: Mapping[str, int], copied: Mapping[str, int] | None = None) -> None:
    """UsageProblem, with numbers that work, unless `shards` divides all `sizes`; ranks may also copy `copied`."""

    def odd(count: int) -> list[str]:
        found = [f"{name} {size}" for name, size in sizes.items() if size % count]
        return found + [f"{name} {size}" for name, size in (copied or {}).items() if size % count and count % size]

    if odd(shards):
        fits = [str(count) for count in range(1, SHARD_LIMIT + 1) if not odd(count)]
        raise UsageProblem(
            f"`{source}` does not divide among {shards} shards: {listing(odd(shards))}",
            hint=f"`--shards` may be {', '.join(fits[:FITS_SHOWN])}",
        )
