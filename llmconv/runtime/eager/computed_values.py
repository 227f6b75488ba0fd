"""Values that a model's own code computes while it is built, such as rotary tables: transformers 5 loses them.

It builds every model on the meta device and then loads the weights. What is not among the weights (buffers that are not
persistent, plain tensors) is left without content, except in transformers' own classes, which compute it again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def restore_computed_values(model: Any) -> None:
    """Gives a loaded model the values that its class computes; the class is built once more, without weights.

    Args:
        model: of custom code, as `from_pretrained` returns it; changed in place.
    """
    with _weights_on_meta():
        built = type(model)(copy.deepcopy(model.config))
    loaded = dict(model.named_modules())
    for name, module in built.named_modules():
        if name in loaded:
            _copy_values(module, loaded[name])


def _copy_values(built: nn.Module, loaded: nn.Module) -> None:
    """Copies the buffers that are not persistent, and plain tensors where the loaded module has none with content."""
    for key in built._non_persistent_buffers_set & loaded._buffers.keys():
        value, found = built._buffers[key], loaded._buffers[key]
        if value is not None and found is not None:
            loaded._buffers[key] = value.to(found.dtype)
    for key, value in vars(built).items():
        if isinstance(value, torch.Tensor) and getattr(vars(loaded).get(key), "is_meta", False):
            setattr(loaded, key, value)


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Parameters of new modules have no memory; everything else is on the CPU."""
    module_class: Any = nn.Module
    register = module_class.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    module_class.register_parameter = on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register
