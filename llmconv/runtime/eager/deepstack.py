"""Features of images that are added to the outputs of the first layers of a decoder (DeepStack)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmconv.runtime.rotary_axes import DEEPSTACK_LAYERS


@contextmanager
def added_after_layers(layers: Sequence[nn.Module], features: Tensor | None) -> Iterator[None]:
    """Context in which the first layers add features to their outputs.

    Args:
        layers: of the decoder, in order.
        features: float [batch, tokens, count * hidden], those of the first layer first; None for none.
    """
    with ExitStack() as hooks:
        if features is not None:
            size = features.shape[-1] // DEEPSTACK_LAYERS
            parts = torch.split(features, size, dim=-1)
            for layer, part in zip(layers, parts, strict=False):
                hooks.callback(layer.register_forward_hook(partial(_add, part)).remove)
        yield


def _add(part: Tensor, layer: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output + part


def deepstacked(model: Any, features: Tensor | None) -> AbstractContextManager[None]:
    """Context in which features of images reach the first layers; transformers takes none after the tower.

    Args:
        model: a multimodal model of transformers.
        features: see `added_after_layers`; None for none.
    """
    return nullcontext() if features is None else added_after_layers(model.model.language_model.layers, features)
