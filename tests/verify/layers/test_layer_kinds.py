"""Kinds of layers: settings count, the number of a layer does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from llmconv.verify.layers.graph_index import layer_kinds


class Layer(torch.nn.Module):
    """A layer with its number and a setting."""

    def __init__(self, number: int, setting: Any) -> None:
        super().__init__()
        self.layer_idx, self.setting = number, setting


class Model(torch.nn.Module):
    """Layers by their settings."""

    def __init__(self, settings: list[Any], **config: Any) -> None:
        super().__init__()
        self.config = LlamaConfig(num_hidden_layers=len(settings), **config)
        self.layers = torch.nn.ModuleList([Layer(at, setting) for at, setting in enumerate(settings)])


def number_of_kinds(model: Model) -> int:
    """Of its layers."""
    return len(set(layer_kinds(model, [f"layers.{at}" for at in range(len(model.layers))])))


@pytest.mark.parametrize(
    ("settings", "kinds"), [([7, 7, 7], 1), ([7, 8, 7], 2), ([False, True], 2), ([0.5, 1.0], 2), ([None, 1], 2)]
)
def test_layers_of_other_settings_are_of_another_kind(settings: list[Any], kinds: int) -> None:
    assert number_of_kinds(Model(settings)) == kinds


def test_entries_of_the_config_by_layer_count() -> None:
    assert number_of_kinds(Model([7, 7, 7], windows=[8, 8, 16])) == 2
