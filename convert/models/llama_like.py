"""A Llama-like model as its `config.json` describes it, and whether a training format can hold that.

transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` and `rope_scaling`; both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.algebra.operations import listing
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem

COUNT_LIMIT = 1 << 31
SHARD_LIMIT = 256
FITS_SHOWN = 12
OFF = (None, False, 0)
"""Values that switch a field off."""
DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
"""What transformers takes for a field that is not there (`LlamaConfig`)."""


OTHER_SIZES = {"n_head", "n_heads", "n_embd", "d_model"}
"""What models that are not like Llama (GPT-2, Bloom, MPT, OPT) call their sizes."""


@dataclass(frozen=True)
class Decoder:
    """The sizes of a model, and how it turns its positions.

    Attributes:
        source: name of the folder, for error messages.
        model_type: the config's.
        hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, max_positions: sizes.
        eps: of the norms.
        theta: base of the rotary frequencies.
        scaling: how they are stretched, with `rope_type`; empty where they are not.
        fields: the whole config.
    """

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
    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of a llama without biases, by Hugging Face's name, in the order of a forward pass."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        block = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        words = (self.vocabulary, self.hidden)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": words}
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
        return {**shapes, "model.norm.weight": (self.hidden,), "lm_head.weight": words}


def read_decoder(checkpoint: Checkpoint) -> Decoder:
    """The model of a Hugging Face folder.

    Raises:
        UnsupportedInput: it is no model like Llama.
        MalformedInput: a size is missing or no number, or the sizes contradict each other.
    """
    fields, source = checkpoint.config, checkpoint.path.name
    if not isinstance(fields.get("model_type"), str):
        raise MalformedInput(f"`config.json` of `{source}` names no `model_type`", hint="repair it; copy it again")
    if OTHER_SIZES & fields.keys() and not {"hidden_size", "num_attention_heads"} <= fields.keys():
        raise UnsupportedInput(
            f"`{source}` is a `{fields['model_type'][:40]}`, and this format holds only models like Llama",
            hint="choose another `--to`, or keep the Hugging Face folder",
        )
    hidden, heads = _count(fields, "hidden_size", source), _count(fields, "num_attention_heads", source)
    kv_heads = _count(fields, "num_key_value_heads", source, heads)
    head_dim = _count(fields, "head_dim", source, max(1, hidden // heads))
    if heads % kv_heads or head_dim % 2 or ("head_dim" not in fields and hidden % heads):
        raise MalformedInput(
            f"`{source}` has {heads} heads and {kv_heads} key/value heads for a size of {hidden}",
            hint="repair its `config.json`; copy the folder again",
        )
    theta, scaling = _rope(fields, source)
    return Decoder(
        source,
        fields["model_type"],
        hidden,
        _count(fields, "intermediate_size", source),
        _count(fields, "num_hidden_layers", source),
        heads,
        kv_heads,
        head_dim,
        _count(fields, "vocab_size", source),
        _count(fields, "max_position_embeddings", source, DEFAULTS["max_position_embeddings"]),
        _number(fields.get("rms_norm_eps", DEFAULTS["rms_norm_eps"]), "rms_norm_eps", source),
        theta,
        scaling,
        fields,
    )


def _count(fields: Mapping[str, Any], name: str, source: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < COUNT_LIMIT:
        raise MalformedInput(
            f"`{name}` in `config.json` of `{source}` is {value!r}", hint="repair it; it should be a positive number"
        )
    return value


def _number(value: Any, name: str, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise MalformedInput(
            f"`{name}` in `config.json` of `{source}` is {value!r}", hint="repair it; it should be a positive number"
        )
    return float(value)


def _rope(fields: Mapping[str, Any], source: str) -> tuple[float, dict[str, Any]]:
    """Base, and what scales the frequencies (`rope_type` in front), whichever transformers wrote it."""
    stored = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(stored, Mapping):
        raise MalformedInput(f"the rope settings of `{source}` are {stored!r}", hint="repair its `config.json`")
    scaling = {name: value for name, value in stored.items() if name not in ("type", "rope_type", "rope_theta")}
    if scaling.get("partial_rotary_factor") == 1:
        del scaling["partial_rotary_factor"]
    kind = stored.get("rope_type", stored.get("type", "default"))
    if not isinstance(kind, str | None):
        raise MalformedInput(f"the rope settings of `{source}` have the type {kind!r}", hint="repair its `config.json`")
    theta = stored.get("rope_theta", fields.get("rope_theta"))
    theta = _number(10000.0 if theta is None else theta, "rope_theta", source)
    return theta, ({} if kind == "default" and not scaling else {"rope_type": kind, **scaling})


def refuse_fields(decoder: Decoder, held: Mapping[str, tuple[Any, ...]], what: str) -> None:
    """Refuses a model with a field that is set to something that the format cannot hold.

    Args:
        decoder: the model.
        held: field to the values that the format can hold; a field that is not there or off is held by all.
        what: the format, such as `Meta's code`.

    Raises:
        UnsupportedInput: lists the fields.
    """
    odd = {
        name: decoder.fields[name]
        for name, values in held.items()
        if decoder.fields.get(name) not in OFF and decoder.fields[name] not in values
    }
    _refuse(decoder, odd, what)


def refuse_other_values(decoder: Decoder, own: Mapping[str, Any], told: Mapping[str, Any], what: str) -> None:
    """Refuses a model with values other than those that the format's own code takes.

    Raises:
        UnsupportedInput: lists the fields.
    """
    _refuse(decoder, {name: value for name, value in own.items() if value != told[name]}, what)


def _refuse(decoder: Decoder, odd: Mapping[str, Any], what: str) -> None:
    if odd:
        raise UnsupportedInput(
            f"`{decoder.source}` has what {what} cannot hold: {listing([f'{name} {odd[name]}' for name in odd])}",
            hint="choose another `--to`, or keep the Hugging Face folder",
        )


def refuse_shards(source: str, shards: int, sizes: Mapping[str, int], copied: Mapping[str, int] | None = None) -> None:
    """Refuses a number of shards that does not divide every one of `sizes` (what it is to its number).

    Args:
        source: folder name for error messages.
        shards: how many.
        sizes: what ranks share out.
        copied: what they share out too, or where there is too little of it hold copies of.

    Raises:
        UsageProblem: lists what does not divide, and the numbers that do.
    """

    def odd(count: int) -> list[str]:
        found = [f"{name} {size}" for name, size in sizes.items() if size % count]
        return found + [f"{name} {size}" for name, size in (copied or {}).items() if size % count and count % size]

    if odd(shards):
        fits = [str(count) for count in range(1, SHARD_LIMIT + 1) if not odd(count)]
        raise UsageProblem(
            f"`{source}` does not divide among {shards} shards: {listing(odd(shards))}",
            hint=f"`--shards` may be {', '.join(fits[:FITS_SHOWN])}",
        )
