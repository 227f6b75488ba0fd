"""GraphIndex: which node computes and reads each value of a graph, and which layer a weight or cache belongs to.

It reads the file alone: names of weights and of cache inputs and outputs, none of the names of nodes, and nothing of
the exporter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx

from llmconv.runtime.cache_names import is_past, layer_of
from llmconv.runtime.low_memory.graph_pieces import values_read_by

NUMBERED = re.compile(r"^(?P<list>(?:[^.]*\.)*?)(?P<number>\d{1,6})(?P<rest>[.\[].*)$")
"""A name in a list of layers, such as `model.layers.12.mlp.up_proj.weight`."""

NO_LAYER = -1
"""Layer of what depends on no weight and no cache of a layer."""


class NotLayered(Exception):
    """The graph does not fall into a part before the layers, equal cuts between them, and a part after them."""


@dataclass(frozen=True)
class GraphIndex:
    """The nodes of a graph by what they compute, read and belong to.

    Attributes:
        model: the graph without its weights.
        layer_list: name of the list of layers, such as `model.layers.`.
        number_of_layers: its length.
        tensors: the tensor of the model whose values each initializer has, as far as that is known.
    """

    model: onnx.ModelProto
    layer_list: str
    number_of_layers: int
    tensors: Mapping[str, str]

    @classmethod
    def of(cls, model: onnx.ModelProto, tensors: Mapping[str, str]) -> GraphIndex:
        """The index of a graph, whose weights name the list of layers.

        Args:
            model: the graph without its weights.
            tensors: the tensor of the model that each initializer is known to be.

        Raises:
            NotLayered: no list of layers.
        """
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
        """Index of the node that computes each value."""
        return {name: at for at, node in enumerate(self.nodes) for name in node.output if name}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """Indices of the nodes that read each value."""
        found: dict[str, list[int]] = defaultdict(list)
        for at, names in enumerate(self.reads):
            for name in names:
                found[name].append(at)
        return found

    @cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        """The initializers by name."""
        return {tensor.name: tensor for tensor in self.model.graph.initializer}

    @cached_property
    def inputs(self) -> dict[str, onnx.ValueInfoProto]:
        """The inputs by name."""
        return {port.name: port for port in self.model.graph.input}

    @cached_property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
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
