"""CacheKind: what the layers of a family keep between two calls, and how their code is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from llmconv.errors import UnsupportedInput
from llmconv.export.library_patches import replaced_attributes
from llmconv.runtime.cache_names import CONVOLUTION, RECURRENT

ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid", "hybrid_sliding"}
STATE_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""transformers' names of layer types (`cache_utils.DYNAMIC_LAYER_TYPE_MAPPING`); a layer of neither keeps nothing."""

Axes = tuple[str | int, ...]


@dataclass(frozen=True)
class State:
    """A tensor of fixed size that a layer keeps.

    Attributes:
        part: `conv` (the last columns before a convolution) or `recurrent`.
        axes: its sizes after the batch axis.
    """

    part: str
    axes: tuple[int, ...]


@dataclass(frozen=True)
class CacheKind:
    """One kind of cache.

    Attributes:
        states: config -> what a layer keeps beside keys and values; empty for attention alone.
        replacements: functions of the model's own module, by name, and what is traced in their place: loops over
            tokens or chunks become one call.
        functions: texts of the functions that are called then, see `functions`.
        heads: config -> (heads, head size) of keys and of values, where they differ from the config's own fields.
        mixed: layers differ as `config.layer_types` says; without it, every layer has keys and values.
    """

    states: Callable[[Any], tuple[State, ...]] = lambda config: ()
    replacements: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    mixed: bool = True
    heads: Callable[[Any], tuple[tuple[int, int], tuple[int, int]]] | None = None

    def names(self, config: Any, past: bool) -> list[tuple[str, Axes | None]]:
        """The cache's inputs or outputs in order, with the axes after the batch axis; None for keys and values.

        Args:
            config: a transformers config.
            past: inputs; otherwise outputs.
        """
        found: list[tuple[str, Axes | None]] = []
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

    def layer(self, config: Any, layer: int) -> tuple[bool, tuple[State, ...]]:
        """Whether a layer has keys and values, and its states."""
        if not self.mixed:
            return True, ()
        kind = config.layer_types[layer]
        return kind in ATTENTION_TYPES, self.states(config) if kind in STATE_TYPES else ()

    def traceable(self, module: ModuleType) -> AbstractContextManager[None]:
        """Replaces the functions of `module` while the context is open.

        Raises:
            UnsupportedInput: `module` lacks one, so its loop would be traced for one length only.
        """
        missing = [name for name in self.replacements if not hasattr(module, name)]
        if missing:
            raise UnsupportedInput(
                f"`{module.__name__}` has no function `{missing[0]}`",
                hint="the family needs another kind of cache, or another version of transformers",
            )
        return replaced_attributes(module, self.replacements)


def first(config: Any, *names: str) -> Any:
    """The first of these fields that the config has: families spell the same size differently."""
    return next(getattr(config, name) for name in names if getattr(config, name, None) is not None)
