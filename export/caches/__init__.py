"""The kinds of caches that layers keep between calls: each is a `CacheKind` in a file and one row of `CACHE_KINDS`.

A kind has the states that the layers of a family keep, and how their code is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from llmconv.errors import UnsupportedInput
from llmconv.runtime.extra_inputs import CONVOLUTION, RECURRENT

ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid", "hybrid_sliding"}
STATE_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""transformers' names of layer types (`cache_utils.DYNAMIC_LAYER_TYPE_MAPPING`); other layers keep nothing."""


@dataclass(frozen=True)
class CacheState:
    """A tensor that a layer keeps between calls."""

    part: str  # `conv` (the last columns before a convolution) or `recurrent`
    axes: tuple[int, ...]  # its fixed sizes, without the batch axis


@dataclass(frozen=True)
class CacheKind:
    """One kind of cache."""

    # returns the states of a layer besides keys and values, given the config
    states: Callable[[Any], tuple[CacheState, ...]] = lambda config: ()
    # functions that are traced instead of those of the model's module, by name, so that a loop over tokens or chunks
    # becomes one call
    replacements: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # definitions of the ONNX functions that are called, by name
    functions: Mapping[str, str] = field(default_factory=dict)
    mixed: bool = True  # layers differ as `config.layer_types` declares; otherwise every layer has keys and values
    # returns (heads, head size) of keys and of values, if they differ from the config's own fields
    heads: Callable[[Any], tuple[tuple[int, int], tuple[int, int]]] | None = None

    def names(self, config: Any, past: bool) -> list[tuple[str, tuple[str | int, ...] | None]]:
        """Names of the cache inputs (`past`) or outputs, with axes after the batch axis; None for keys and values."""
        found: list[tuple[str, tuple[str | int, ...] | None]] = []
        prefix, keys = ("past_", "past_key_values") if past else ("present_", "present")
        for layer in range(config.num_hidden_layers):
            has_keys, states = self.layer(config, layer)
            found += [(f"{keys}.{layer}.{part}", None) for part in ("key", "value") if has_keys]
            for part in (CONVOLUTION, RECURRENT):
                same = [state.axes for state in states if state.part == part]
                for index, axes in enumerate(same):
                    number = f".{index}" if len(same) > 1 else ""
                    found.append((f"{prefix}{part}.{layer}{number}", axes))
        return found

    def layer(self, config: Any, layer: int) -> tuple[bool, tuple[CacheState, ...]]:
        if not self.mixed:
            return True, ()
        kind = config.layer_types[layer]
        return kind in ATTENTION_TYPES, self.states(config) if kind in STATE_TYPES else ()

    def traceable(self, module: ModuleType) -> AbstractContextManager[None]:
        """Replaces the functions of `module` while the context is open.

        Raises UnsupportedInput: `module` lacks one, so its loop would be traced for one length only.
        """
        from llmconv.export.library_patches import replaced_attributes  # noqa: PLC0415 - torch, of a trace alone

        missing = [name for name in self.replacements if not hasattr(module, name)]
        if missing:
            raise UnsupportedInput(
                f"`{module.__name__}` has no function `{missing[0]}`",
                hint="the family needs another kind of cache, or another version of transformers",
            )
        return replaced_attributes(module, self.replacements)


def first(config: Any, *names: str) -> Any:
    """The first of these fields that the config has: families have different names for the same size."""
    return next(getattr(config, name) for name in names if getattr(config, name, None) is not None)


CACHE_KINDS: dict[str, tuple[str, str] | None] = {
    "heads": None,
    "convolution": ("state_space", "CONVOLUTION_KIND"),
    "selective_scan": ("state_space", "SELECTIVE_SCAN_KIND"),
    "state_space": ("state_space", "STATE_SPACE_KIND"),
    "delta_rule": ("delta_rule", "KIND"),
    "channel_delta_rule": ("delta_rule", "CHANNEL_KIND"),
}
"""Kinds by `InputMap.cache`: module and name. Their functions need torch, and the table of families does not."""


def cache_kind(name: str) -> CacheKind:
    place = CACHE_KINDS[name]
    if place is None:
        return CacheKind(mixed=False)
    found: CacheKind = getattr(import_module(f"{__name__}.{place[0]}"), place[1])
    return found
