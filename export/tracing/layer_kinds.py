"""Which layers of a model are alike, by their modules and the shapes of their parameters.

Configs declare this in too many ways: experts from some layer on, attention to images in some, other head sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from transformers import PreTrainedModel

from llmconv.export.input_map import decoder_config
from llmconv.export.tracing.fake_model import depth


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """A string for every layer, equal for layers that are alike except for numbers such as scales."""
    return [_kind(layer) for layer in model.get_submodule(layers_name(model)).children()]


def first_alike(kinds: Sequence[str], period: int) -> int:
    """The first layer from which every layer is like the layer one period later."""
    pairs = enumerate(zip(kinds, kinds[period:], strict=False))
    return max((layer + 1 for layer, (kind, later) in pairs if kind != later), default=0)


def factors(model: nn.Module) -> dict[str, float]:
    """All float attributes of modules by name; they may differ in a shortened model."""
    return {
        f"{name}.{setting}": value
        for name, module in model.named_modules()
        for setting, value in vars(module).items()
        if isinstance(value, float)
    }


def layers_name(model: PreTrainedModel) -> str:
    """Name of the list of the decoder's layers (`model.layers`), not of an image encoder with as many layers."""
    num_layers = depth(model.config)
    decoder = model.get_decoder() if decoder_config(model.config) is not model.config else model
    parts = set(decoder.modules())
    named: Iterable[tuple[str, nn.Module]] = model.named_modules()
    lists = [(name, part) for name, part in named if isinstance(part, nn.ModuleList) and part in parts]
    return min((name for name, part in lists if len(part) == num_layers), key=len)


def _kind(layer: nn.Module) -> str:
    parts = [(name, type(part).__name__) for name, part in layer.named_modules()]
    return repr((parts, [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]))
