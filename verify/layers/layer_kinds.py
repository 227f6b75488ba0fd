"""Kinds of layers of the eager model: which of them compute the same function, up to their weights and their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from llmconv.runtime.eager.layer_modules import layer_modules
from llmconv.verify.layers.graph_index import NotLayered

Kind = tuple[Any, ...]
SCALARS = (bool, int, float, str, type(None))


def layer_names(model: torch.nn.Module, count: int, layer_list: str) -> tuple[str, ...]:
    """Module names of the layers, in order.

    Args:
        model: the eager model; its weights may be without content.
        count: number of layers of the graph.
        layer_list: name of the list of layers in the names of weights, such as `model.layers.`.

    Raises:
        NotLayered: the model has no list of `count` layers.
    """
    lists: dict[str, list[str]] = {}
    for name in layer_modules(model):
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    found = {name: names for name, names in lists.items() if len(names) == count}
    last = layer_list.rstrip(".").rpartition(".")[2]
    near = [name for name in found if name.rpartition(".")[2] == last] or list(found)
    if not near:
        raise NotLayered(f"the model has no list of {count} layers")
    return tuple(found[near[0]])


def layer_kinds(model: torch.nn.Module, names: Sequence[str]) -> list[Kind]:
    """The kind of each layer: classes, shapes, settings and entries in the config.

    Args:
        model: the eager model; its weights may be without content.
        names: of its layers, in order.
    """
    described = [_described(model.get_submodule(name)) for name in names]
    keys = {key for one in described for key in one}
    numbers = {key for key in keys if all(_is_number(one, key, at) for at, one in enumerate(described))}
    config = model.config.get_text_config(decoder=True).to_dict()  # type: ignore[operator, union-attr]
    lists = [value for _, value in sorted(config.items()) if isinstance(value, list) and len(value) == len(names)]
    entries = [value for value in lists if value != list(range(len(names)))]
    return [
        (tuple(sorted((key, repr(value)) for key, value in one.items() if key not in numbers)), *_at(entries, at))
        for at, one in enumerate(described)
    ]


def _is_number(described: Mapping[str, Any], key: str, at: int) -> bool:
    """Whether an entry is the layer's own number, or absent; `True` is a setting."""
    return key not in described or (type(described[key]) is int and described[key] == at)


def _at(entries: Sequence[Sequence[Any]], at: int) -> tuple[str, ...]:
    return tuple(repr(entry[at]) for entry in entries)


def _described(layer: torch.nn.Module) -> Mapping[str, Any]:
    """Every class, shape and setting in a layer, by place."""
    found: dict[str, Any] = {}
    for name, module in layer.named_modules():
        found[f"{name} class"] = type(module).__qualname__
        for key, tensor in module.named_parameters(recurse=False):
            found[f"{name}.{key} shape"] = tuple(tensor.shape)
        for key, value in vars(module).items():
            if key.startswith("_") or key == "training":
                continue
            if isinstance(value, SCALARS) or (
                isinstance(value, (tuple, list)) and all(isinstance(one, SCALARS) for one in value)
            ):
                found[f"{name}.{key}"] = value
    return found
