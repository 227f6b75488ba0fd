"""Skipped layers: layers of an eager model that return their hidden state unchanged, and hold no weights.

A model without most of its layers is small, and its remaining layers, their numbers, masks and caches are those of the
whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from llmconv.errors import UnsupportedInput

HINT = "run `llmconv verify --method whole`"


def skip_layers(layers: Mapping[str, torch.nn.Module], skipped: Collection[str]) -> None:
    """Replaces the layers `skipped`, among which the first must not be, of a model in place.

    The model raises UnsupportedInput when it runs if a layer returns no hidden state.
    """
    last = LastResult()
    for name, layer in layers.items():
        if name not in skipped:
            last = LastResult.of(layer)
            continue
        layer.forward = SkippedLayer(name, last)
        layer.to("meta")


class LastResult:
    """What a layer returned last, as the model that a skipped layer follows."""

    def __init__(self) -> None:
        self.value: Any = None

    @classmethod
    def of(cls, layer: torch.nn.Module) -> LastResult:
        """Watches a layer."""
        found = cls()
        layer.register_forward_hook(found._keep)
        return found

    def _keep(self, layer: torch.nn.Module, args: Any, result: Any) -> None:
        self.value = result


class SkippedLayer:
    """The forward pass of a skipped layer; returns the form of the `results` of the last layer that was not skipped."""

    def __init__(self, name: str, results: LastResult) -> None:
        self._name, self._results = name, results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden state, in the form in which other layers return it."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        last = self._results.value
        if isinstance(hidden, torch.Tensor) and isinstance(last, torch.Tensor):
            return hidden
        if isinstance(hidden, torch.Tensor) and isinstance(last, tuple):
            return (hidden, *last[1:])
        raise UnsupportedInput(f"`{self._name}` returns no hidden state, and cannot be skipped", hint=HINT)
