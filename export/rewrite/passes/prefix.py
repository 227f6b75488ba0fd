"""`--prefix`: with an empty past, a graph begins with the keys and values of a prefix.

To the client the model has no prefix, except that the cache is P tokens longer: with an empty past the graph prepends
the prefix, extends the mask and shifts the positions itself; any other past contains the prefix already, and the mask
covers it like every past.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from llmconv.errors import UnsupportedInput
from llmconv.export.node_editor import NodeEditor, constant, integers, replace_uses, value_named

PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
PRESENT_LENGTH = "present_sequence_length"
"""The symbol of a cache length that is not `past_sequence_length + sequence_length`."""

LENGTH_AXIS = 2


def past_ports(graph: ir.Graph) -> dict[str, ir.Value]:
    """The past inputs by layer and part: `0.key`, `0.value`, `1.key` and so on."""
    found = {name[1] + "." + name[2]: port for port in graph.inputs if (name := PAST.fullmatch(port.name or ""))}
    if not found or any((port.name or "").startswith("past_") and port not in found.values() for port in graph.inputs):
        raise UnsupportedInput(
            "`--prefix`: this model keeps more than keys and values", hint="export it without `--prefix`"
        )
    return found


def cache_shapes(graph: ir.Graph) -> list[tuple[int, int]]:
    """(kv_heads, head_dim) of every layer, keys and values alike."""
    shapes = {name: (int(port.shape[1]), int(port.shape[3])) for name, port in past_ports(graph).items()}  # type: ignore
    layers = len(shapes) // 2
    if any(shapes[f"{layer}.key"] != shapes[f"{layer}.value"] for layer in range(layers)):
        raise UnsupportedInput("`--prefix`: keys and values differ in shape", hint="export without `--prefix`")
    return [shapes[f"{layer}.key"] for layer in range(layers)]


def prepend_prefix(model: ir.Model, tensors: Mapping[str, ir.ExternalTensor], first_position: int) -> None:
    """Prepends a prefix to an empty past of a decoder's graph for prompts, in place.

    Args:
        model: the graph.
        tensors: keys and values `[1, kv_heads, P, head_dim]` by layer and part: `0.key`, `0.value`, …
        first_position: position of the first token after the prefix: P or 0.

    Raises:
        UnsupportedInput: a layer keeps more than keys and values.
    """
    graph = model.graph
    ports = past_ports(graph)
    length = int(next(iter(tensors.values())).shape[LENGTH_AXIS])  # type: ignore[arg-type]
    inserter = _PrefixInserter(graph, length)
    for name, port in ports.items():
        layer, part = name.split(".")
        tensor = tensors[name]
        stored = ir.val(f"prefix.{name}", tensor.dtype, tensor.shape, const_value=tensor)
        graph.register_initializer(stored)
        inserter.before_past(port, stored, f"prefix.{layer}.{part}")
    inserter.before_mask()
    if first_position:
        inserter.shift_positions()
    for output in graph.outputs:
        if (output.name or "").startswith("present.") and output.shape is not None:
            axes = list(output.shape)
            output.shape = ir.Shape([*axes[:LENGTH_AXIS], PRESENT_LENGTH, *axes[LENGTH_AXIS + 1 :]])
    graph.sort()


class _PrefixInserter:
    """Prepends the prefix to past, mask and positions: P tokens with an empty past, otherwise none."""

    def __init__(self, graph: ir.Graph, length: int) -> None:
        self._graph = graph
        self._edit = NodeEditor(graph, graph[0], "prefix")
        first = next(iter(past_ports(graph).values()))
        past = self._edit.one("Shape", [first], {"start": LENGTH_AXIS, "end": LENGTH_AXIS + 1})
        is_empty = self._edit.one("Equal", [past, integers(graph, 0)])
        self._count = self._edit.one("Where", [is_empty, integers(graph, length), integers(graph, 0)])
        tokens = value_named(graph.inputs, "input_ids")
        assert tokens is not None
        self._batch = self._edit.one("Shape", [tokens], {"start": 0, "end": 1})
        self._rows = self._edit.one("Concat", [self._batch, integers(graph, 1, 1, 1)], {"axis": 0})
        self._own = {past.producer()}

    def before_past(self, port: ir.Value, stored: ir.Value, scope: str) -> None:
        """Makes users of a past input read the prefix and the past, and users of its shape the sum of the lengths."""
        uses = [use for use in port.uses() if use.node not in self._own]
        edit = NodeEditor(self._graph, self._graph[0], scope)
        some = edit.one("Slice", [stored, integers(self._graph, 0), self._count, integers(self._graph, LENGTH_AXIS)])
        both = edit.one("Concat", [edit.one("Expand", [some, self._rows]), port], {"axis": LENGTH_AXIS})
        for node, index in uses:
            if node.op_type == "Shape":
                self._lengthen(node)
            else:
                node.replace_input_with(index, both)

    def _lengthen(self, shape: ir.Node) -> None:
        """Adds the prefix to the length that a node reads from a past input."""
        start, end = shape.attributes.get_int("start", 0), shape.attributes.get_int("end", 4)
        if not start <= LENGTH_AXIS < end:
            return
        result = shape.outputs[0]
        uses = list(result.uses())
        where = np.array([axis == LENGTH_AXIS for axis in range(start, end)], dtype=np.int64)
        edit = NodeEditor(self._graph, self._graph[0], f"prefix/{shape.name}")
        mask = constant(self._graph, f"int64_axes_{start}_{end}", where)
        longer = edit.one("Add", [result, edit.one("Mul", [self._count, mask])])
        replace_uses(uses, longer)

    def before_mask(self) -> None:
        """Prepends ones for the prefix to the mask."""
        mask = value_named(self._graph.inputs, "attention_mask")
        assert mask is not None
        uses = list(mask.uses())
        shape = self._edit.one("Concat", [self._batch, self._count], {"axis": 0})
        ones = self._edit.one("Expand", [integers(self._graph, 1), shape])
        replace_uses(uses, self._edit.one("Concat", [ones, mask], {"axis": 1}))

    def shift_positions(self) -> None:
        """Shifts the positions by the length of the prefix."""
        positions = value_named(self._graph.inputs, "position_ids")
        if positions is not None:
            uses = list(positions.uses())
            replace_uses(uses, self._edit.one("Add", [positions, self._count]))
