"""layer_modules: the layers of an eager model by name."""

from __future__ import annotations

import torch


def layer_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The elements of all outermost `ModuleList`s by name."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{layer}.") for layer in found):
            found |= {f"{name}.{index}": layer for index, layer in module.named_children()}
    return found
