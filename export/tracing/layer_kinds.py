"""Which layers of a model are made alike: by their modules and the shapes of their parameters.

A config says it in too many ways: experts from some layer on, attention to images in some, heads of another size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from transformers import PreTrainedModel

from llmconv.export.input_maps import decoder_config
from llmconv.export.tracing.fake_model import depth


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """A text for every layer; equal ones are made alike. What differs in numbers only is not seen here."""
    return [_made_of(layer) for layer in model.get_submodule(layers_name(model)).children()]


def first_alike(kinds: Sequence[str], period: int) -> int:
    """The first layer from which on every layer is like the one a period later."""
    pairs = enumerate(zip(kinds, kinds[period:], strict=False))
    return max((layer + 1 for layer, (kind, later) in pairs if kind != later), default=0)


def factors(model: nn.Module) -> dict[str, float]:
    """Every number that a module computed for itself, by name: a model cut short may not have the same."""
    return {
        f"{name}.{setting}": value
        for name, module in model.named_modules()
        for setting, value in vars(module).items()
        if isinstance(value, float)
    }


def layers_name(model: PreTrainedModel) -> str:
    """Of the list of the decoder's layers (`model.layers`); a tower for images beside it may have as many."""
    num_layers = depth(model.config)
    decoder = model.get_decoder() if decoder_config(model.config) is not model.config else model
    parts = set(decoder.modules())
    named: Iterable[tuple[str, nn.Module]] = model.named_modules()
    lists = [(name, part) for name, part in named if isinstance(part, nn.ModuleList) and part in parts]
    return min((name for name, part in lists if len(part) == num_layers), key=len)


def _made_of(layer: nn.Module) -> str:
    parts = [(name, type(part).__name__) for name, part in layer.named_modules()]
    return repr((parts, [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]))
