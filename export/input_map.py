"""InputMap: the inputs and outputs of a family's graphs; Port: one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export.caches import CACHE_KINDS, CacheKind, cache_kind
from llmconv.runtime.extra_inputs import BATCH, PAST, POSITIONS, SEQUENCE, TOTAL, ExtraInput, layer_of, resolved_inputs
from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array


@dataclass(frozen=True)
class Port:
    """One input or output of a graph; axes are symbols (dynamic) or sizes (fixed)."""

    name: str
    dtype: str  # `int64`, `int32`, `bool` or `float32`
    axes: tuple[str | int, ...]


@dataclass(frozen=True)
class InputMap:
    """The inputs and outputs of a family's graphs.

    Attributes:
        position_ids: whether the graph has the input `position_ids` (ALiBi families count the mask instead).
        cache: the kind of cache, a row of `caches.CACHE_KINDS`: `heads` is one key and one value per key/value head.
        extras: inputs that only some families have, such as `token_type_ids`.
        image_extras: further inputs of graphs that take features of images instead of tokens.
        note: special properties of the family, for the table of families.
        first_layers: number of first layers that take inputs of their own, so that they are not like the others.
    """

    position_ids: bool = True
    cache: str = "heads"
    note: str = ""
    extras: tuple[ExtraInput, ...] = ()
    image_extras: tuple[ExtraInput, ...] = ()
    first_layers: int = 0

    def __post_init__(self) -> None:
        extras = (*self.extras, *self.image_extras)
        names = [*([POSITIONS] if self.position_ids else []), *(extra.name for extra in extras)]
        if len(set(names)) < len(names):
            raise UsageProblem(
                f"the input map has the extra input `{max(names, key=names.count)}` twice", hint="leave out one of them"
            )

    def both_ways(self, config: Any) -> bool:
        """Whether some tokens attend to later ones, see `ExtraInput.both_ways`. `config`: a transformers config."""
        return any(extra.both_ways for extra in self.extra_inputs(config).values())

    @property
    def heeds_positions(self) -> bool:
        """Whether the graph has the input `position_ids`, with one or several positions for each token."""
        return self.position_ids or any(extra.name == POSITIONS for extra in self.extras)

    @property
    def kind(self) -> CacheKind:
        """The kind of cache. Raises UnsupportedInput: an unknown kind."""
        if self.cache not in CACHE_KINDS:
            raise UnsupportedInput(f"unknown cache kind `{self.cache}`", hint=f"one of: {', '.join(CACHE_KINDS)}")
        return cache_kind(self.cache)

    def inputs(self, config: Any) -> tuple[Port, ...]:
        """Inputs of every graph, in order; `past_sequence_length` may be 0. `config`: a transformers config."""
        ports = [Port("input_ids", "int64", (BATCH, SEQUENCE)), Port("attention_mask", "int64", (BATCH, TOTAL))]
        if self.position_ids:
            ports.append(Port("position_ids", "int64", (BATCH, SEQUENCE)))
        extras = [Port(name, extra.dtype, extra.declared) for name, extra in self.extra_inputs(config).items()]
        return (*ports, *extras, *self.past(config))

    def extra_inputs(self, config: Any) -> dict[str, ExtraInput]:
        """The extra inputs of a model by name, with numbers as sizes, see `resolved_inputs`."""
        return resolved_inputs(self.extras, decoder_config(config))

    def outputs(self, config: Any) -> tuple[Port, ...]:
        logits = Port("logits", "float32", (BATCH, SEQUENCE, decoder_config(config).vocab_size))
        return (logits, *self.present(config))

    def past(self, config: Any) -> tuple[Port, ...]:
        """The cache's inputs, layers in order."""
        return self._cache_ports(config, PAST)

    def present(self, config: Any) -> tuple[Port, ...]:
        """The cache's outputs, in the order of its inputs."""
        return self._cache_ports(config, TOTAL)

    def positions(self, attention_mask: Array, new_tokens: int) -> Array:
        """Position ids of the last `new_tokens` tokens, int64 [batch, new_tokens]; a family may override this.

        `attention_mask`: [batch, all tokens], 0 for padding. `new_tokens`: number of new tokens.
        """
        return default_positions(attention_mask, new_tokens)

    def _cache_ports(self, config: Any, length: str) -> tuple[Port, ...]:
        ports = []
        config = decoder_config(config)
        for name, axes in self.kind.names(config, past=length == PAST):
            if axes is None:
                own = config
                if getattr(config, "is_heterogeneous", False):
                    own = config.per_layer_config[layer_of(name) or 0]
                usual = (kv_heads(own), head_dim(own)) if not self.kind.heads else (0, 0)
                shapes = self.kind.heads(own) if self.kind.heads else (usual, usual)  # of keys and of values
                heads, size = shapes[name.endswith(".value")]
                axes = (heads, length, size)
            ports.append(Port(name, "float32", (BATCH, *axes)))
        return tuple(ports)


def decoder_config(config: Any) -> Any:
    """The part of a config that describes the decoder: that of the text model in a multi-modal config."""
    return getattr(config, "text_config", None) or config


def kv_heads(config: Any) -> int:
    """Number of key/value heads, with grouped-query attention fewer than query heads."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: Any) -> int:
    """Size of one head, which in some families is not `hidden_size / num_attention_heads`."""
    own = getattr(config, "attention_head_dim", None) or getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)
