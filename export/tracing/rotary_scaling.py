"""Rotary frequencies that depend on the length (`longrope`, `dynamic`) as functions of the positions.

transformers writes them into a buffer of the module while it runs, and `dynamic` remembers the longest sequence so far.
A graph has no memory, and a growing sequence needs none: the length of each call determines the frequencies.

    longrope   long factors beyond the original context, otherwise short ones, for all tokens of the call
    dynamic    base * (factor * length / original - (factor - 1)) ** (dim / (dim - 2)) beyond it

Source: transformers modeling_rope_utils.py, `dynamic_rope_update`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ORIGINAL = "original_max_position_embeddings"


def frequencies_from_positions(model: nn.Module) -> None:
    """Replaces the forward of every rotary module with such frequencies by one without side effects, in place."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer: dict[str | None, Any] = kinds if isinstance(kinds, dict) else {None: kinds}
        if any(_depends_on_length(kind) for kind in by_layer.values()):
            _register_long_frequencies(module, by_layer)
            module.forward = _RotaryForward(module, by_layer)


def _depends_on_length(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _register_long_frequencies(module: Any, by_layer: dict[str | None, Any]) -> None:
    """Registers the frequencies of the long factors as buffers."""
    for layer_type, kind in by_layer.items():
        if kind == "longrope":
            length = _parameters(module, layer_type)[ORIGINAL] + 1
            long, _ = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=length, **_given(layer_type))
            module.register_buffer(f"{_prefix(layer_type)}long_inv_freq", long, persistent=False)


def _parameters(module: Any, layer_type: str | None) -> Any:
    parameters = module.config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def _prefix(layer_type: str | None) -> str:
    return "" if layer_type is None else f"{layer_type}_"


def _given(layer_type: str | None) -> dict[str, str]:
    return {} if layer_type is None else {"layer_type": layer_type}


class _RotaryForward:
    """The forward of a rotary module without its decorators."""

    def __init__(self, module: Any, by_layer: dict[str | None, Any]) -> None:
        self._module, self._by_layer = module, by_layer
        self._inner = inspect.unwrap(type(module).forward)

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Cosines and sines of the positions, like the module's own forward."""
        kind, name = self._by_layer[layer_type], f"{_prefix(layer_type)}inv_freq"
        module = self._module
        if _depends_on_length(kind):
            module = _ModuleView(self._module, name, self._frequencies(kind, position_ids, layer_type))
        return self._inner(module, x, position_ids, **_given(layer_type))

    def _frequencies(self, kind: str, position_ids: Tensor, layer_type: str | None) -> Tensor:
        module, prefix = self._module, _prefix(layer_type)
        length = position_ids.max() + 1
        short = getattr(module, f"{prefix}original_inv_freq")
        if kind == "longrope":
            original, long = _parameters(module, layer_type)[ORIGINAL], getattr(module, f"{prefix}long_inv_freq")
        else:
            original = module.original_max_seq_len
            long, _ = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=length, **_given(layer_type))
        return torch.where(length > original, long, short)


class _ModuleView:
    """A module with one attribute replaced."""

    def __init__(self, module: nn.Module, name: str, value: Tensor) -> None:
        self._module, self._replaced = module, {name: value}

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._module, name)
