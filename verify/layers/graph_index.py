"""GraphIndex: which node computes and reads each value of a graph, and which layer a weight or cache belongs to.

It reads only names of weights and of cache inputs and outputs, no names of nodes, and nothing of the exporter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx
import torch

from llmconv.runtime.eager.runner import layer_modules
from llmconv.runtime.extra_inputs import is_past, layer_of
from llmconv.runtime.onnxruntime.guard import values_read_by
from llmconv.tensors import lists_by_key

NUMBERED = re.compile(r"^(?P<list>(?:[^.]*\.)*?)(?P<number>\d{1,6})(?P<rest>[.\[].*)$")
"""A name in a list of layers, such as `model.layers.12.mlp.up_proj.weight`."""

NO_LAYER = -1  # layer of what depends on no weight and no cache of a layer


class NotLayered(Exception):
    """The graph does not fall into a part before the layers, equal cuts between them, and a part after them."""


@dataclass(frozen=True)
class GraphIndex:
    """The nodes of a graph, without its weights, by what they compute, read and belong to."""

    model: onnx.ModelProto
    layer_list: str  # name of the list of layers, such as `model.layers.`
    number_of_layers: int
    tensors: Mapping[str, str]  # the tensor of the model whose values each initializer has, as far as that is known

    @classmethod
    def of(cls, model: onnx.ModelProto, tensors: Mapping[str, str]) -> GraphIndex:
        """The index of a graph; NotLayered if the names of its weights show no list of layers."""
        lists: dict[str, set[int]] = defaultdict(set)
        for tensor in model.graph.initializer:
            if match := NUMBERED.match(tensor.name):
                lists[match["list"]].add(int(match["number"]))
        longest = max(lists, key=lambda name: len(lists[name]), default="")
        count = len(lists[longest])
        if count < 2 or lists[longest] != set(range(count)):
            raise NotLayered("its weights do not name a list of two or more layers")
        return cls(model, longest, count, tensors)

    @cached_property
    def nodes(self) -> list[onnx.NodeProto]:
        """The nodes in the order of the file, in which every value is computed before it is read."""
        return list(self.model.graph.node)

    @cached_property
    def reads(self) -> list[set[str]]:
        """The values that each node reads, those of its subgraphs included."""
        return [values_read_by(node) - {""} for node in self.nodes]

    @cached_property
    def producers(self) -> dict[str, int]:
        return {name: at for at, node in enumerate(self.nodes) for name in node.output if name}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        return lists_by_key((name, at) for at, names in enumerate(self.reads) for name in names)

    @cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        return {tensor.name: tensor for tensor in self.model.graph.initializer}

    @cached_property
    def inputs(self) -> dict[str, onnx.ValueInfoProto]:
        return {port.name: port for port in self.model.graph.input}

    @cached_property
    def outputs(self) -> list[str]:
        return [port.name for port in self.model.graph.output]

    def layer_of_weight(self, name: str) -> int:
        """The layer of an initializer, by its name."""
        match = NUMBERED.match(name) if name in self.initializers else None
        return int(match["number"]) if match and match["list"] == self.layer_list else NO_LAYER

    @cached_property
    def layers(self) -> list[int]:
        """By node, the last layer among those whose weights or caches it depends on.

        The shape of a cache belongs to no layer: all caches of a kind have the same symbolic shape.
        """
        of_value: dict[str, int] = {}
        found: list[int] = []
        for node, names in zip(self.nodes, self.reads, strict=True):
            only_shape = node.op_type == "Shape" and not node.domain
            layer = max((self._layer_of(name, of_value, only_shape) for name in names), default=NO_LAYER)
            found.append(layer)
            of_value |= dict.fromkeys(node.output, layer)
        return found

    def _layer_of(self, name: str, of_value: dict[str, int], only_shape: bool) -> int:
        if name in of_value:
            return of_value[name]
        if name in self.inputs and is_past(name):
            return NO_LAYER if only_shape else int(layer_of(name) or 0)
        return self.layer_of_weight(name)

    @cached_property
    def token_values(self) -> set[str]:
        """Values that depend on the tokens themselves, not only on their number."""
        found: set[str] = {"input_ids", "inputs_embeds"} & self.inputs.keys()
        for node, names in zip(self.nodes, self.reads, strict=True):
            if names & found and not (node.op_type == "Shape" and not node.domain):
                found.update(node.output)
        return found


Kind = tuple[Any, ...]
SCALARS = (bool, int, float, str, type(None))


def layer_names(model: torch.nn.Module, count: int, layer_list: str) -> tuple[str, ...]:
    """Module names of the layers, in order, in the eager model, whose weights may be without content.

    `layer_list`: name of the list of layers in the names of weights, such as `model.layers.`. Raises NotLayered: the
    model has no list of `count` layers.
    """
    lists = lists_by_key((name.rpartition(".")[0], name) for name in layer_modules(model))
    found = {name: names for name, names in lists.items() if len(names) == count}
    last = layer_list.rstrip(".").rpartition(".")[2]
    near = [name for name in found if name.rpartition(".")[2] == last] or list(found)
    if not near:
        raise NotLayered(f"the model has no list of {count} layers")
    return tuple(found[near[0]])


def layer_kinds(model: torch.nn.Module, names: Sequence[str]) -> list[Kind]:
    """The kind of each layer: classes, shapes, settings and entries in the config; weights may be without content."""
    described = [_described(model.get_submodule(name)) for name in names]
    keys = {key for one in described for key in one}
    numbers = {key for key in keys if all(_is_number(one, key, at) for at, one in enumerate(described))}
    config = model.config.get_text_config(decoder=True).to_dict()  # type: ignore[operator, union-attr]
    lists = [value for _, value in sorted(config.items()) if isinstance(value, list) and len(value) == len(names)]
    entries = [value for value in lists if value != list(range(len(names)))]
    return [
        (
            tuple(sorted((key, repr(value)) for key, value in one.items() if key not in numbers)),
            *(repr(entry[at]) for entry in entries),
        )
        for at, one in enumerate(described)
    ]


def _is_number(described: Mapping[str, Any], key: str, at: int) -> bool:
    """Whether an entry is the layer's own number, or absent; `True` is a setting."""
    return key not in described or (type(described[key]) is int and described[key] == at)


def _described(layer: torch.nn.Module) -> Mapping[str, Any]:
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
