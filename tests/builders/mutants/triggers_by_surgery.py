"""Triggers: graphs that are wrong at one length, position, batch or token only, by surgery on real exports.

Each adds a few nodes that do nothing until a call meets the trigger, which no scenario does, as a number does that a
trace has kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import helper

from tests.builders.mutants.surgery import constant_value, replace_input, users
from tests.builders.mutants.trigger_nodes import BATCH, BOOL, FLOAT, INT, LENGTH, POSITION, TOKEN, Nodes, Trigger


def position_equal(graph: Nodes) -> None:
    graph.scale_each(graph.loud(graph.make("Equal", "position_ids", POSITION)))


def position_above(graph: Nodes) -> None:
    graph.scale_each(graph.loud(graph.make("Greater", "position_ids", LENGTH)))


def total_length_above(graph: Nodes) -> None:
    graph.scale_hidden(graph.make("Where", graph.make("Greater", graph.total_length(), LENGTH), 2.0, 1.0))


def past_length_equal(graph: Nodes) -> None:
    graph.scale_hidden(graph.loud(graph.make("Equal", graph.past_length(), POSITION)))


def new_length_equal(graph: Nodes) -> None:
    graph.scale_hidden(graph.loud(graph.make("Equal", graph.new_length(), 777)))


def batch_equal(graph: Nodes) -> None:
    graph.scale_hidden(graph.loud(graph.make("Equal", graph.batch(), BATCH)))


def shape_gathered(graph: Nodes) -> None:
    length = graph.make("Gather", graph.make("Shape", "attention_mask"), 1)
    graph.scale_hidden(graph.loud(graph.make("Equal", length, POSITION)))


def token_equal(graph: Nodes) -> None:
    graph.scale_each(graph.loud(graph.make("Equal", "input_ids", TOKEN)))


def token_at_a_position(graph: Nodes) -> None:
    """Some tokens at position 90 only."""
    first = graph.make("Equal", graph.make("Mod", "input_ids", 13), 7)
    graph.scale_each(graph.loud(graph.make("And", first, graph.make("Equal", "position_ids", 90))))


def mask_sum(graph: Nodes) -> None:
    seen = graph.make("ReduceSum", "attention_mask", np.array([1]), keepdims=1)
    graph.scale_each(graph.loud(graph.make("Greater", seen, LENGTH)))


def mask_by_difference(graph: Nodes) -> None:
    """Padding of exactly 512 tokens."""
    seen = graph.make("ReduceSum", "attention_mask", np.array([1]), keepdims=1)
    graph.scale_each(graph.loud(graph.make("Equal", graph.make("Sub", graph.total_length(), seen), 512)))


def number_in_parts(graph: Nodes) -> None:
    """3817 as a sum of what is left over from two others."""
    shifted = graph.make("Sub", graph.make("Sub", "position_ids", 3800), 17)
    graph.scale_each(graph.loud(graph.make("Equal", shifted, 0)))


def number_by_multiples(graph: Nodes) -> None:
    """256 * position is no larger than 1024 until position 5."""
    graph.scale_each(graph.loud(graph.make("Greater", graph.make("Mul", "position_ids", 256), 1310720)))


def inside_an_if(graph: Nodes) -> None:
    condition = graph.make("Squeeze", graph.make("Greater", graph.total_length(), LENGTH))
    branches = {}
    for branch, value in (("then_branch", 2.0), ("else_branch", 1.0)):
        node = helper.make_node("Constant", [], [branch], value_float=value)
        branches[branch] = helper.make_graph([node], branch, [], [onnx.ValueInfoProto(name=branch)])
    graph.scale_hidden(graph.make("If", condition, **branches))


def by_a_range(graph: Nodes) -> None:
    """The sum of the indices from 5000 to the length is zero until there are any."""
    length = graph.make("Squeeze", graph.total_length())
    tail = graph.make("Max", length, LENGTH)
    indices = graph.make("Range", LENGTH, tail, 1)
    graph.scale_hidden(graph.make("Add", graph.make("Cast", graph.make("ReduceSum", indices), to=FLOAT), 1.0))


def by_a_cut(graph: Nodes) -> None:
    """A mask cut at 5000 keys and padded again."""
    graph.scale_hidden(graph.loud(graph.make("Greater", _keys_after(graph, LENGTH), 0)))


def _keys_after(graph: Nodes, start: int) -> str:
    rest = graph.make("Slice", "attention_mask", np.array([start]), np.array([1 << 62]), np.array([1]))
    return graph.make("ReduceSum", rest, keepdims=0)


def by_a_table(graph: Nodes) -> None:
    table = np.ones(1 << 13, np.float32)
    table[POSITION] = 2
    graph.scale_each(graph.make("Gather", graph.constant(table), "position_ids"))


def by_a_token_table(graph: Nodes) -> None:
    table = np.ones(131, np.float32)
    table[TOKEN] = 2
    graph.scale_each(graph.make("Gather", graph.constant(table), "input_ids"))


def by_a_rotary_table(graph: Nodes) -> None:
    """Cosines from a table of which one row is another."""
    cosine = users(graph.model, "Cos")[0]
    angles = next(node for node in users(graph.model, "Mul") if "rotary_emb" in node.name)
    values = (constant_value(graph.model, name) for name in angles.input)
    half = next(value for value in values if value is not None).ravel()
    table = np.cos(np.arange(1 << 13, dtype=np.float32)[:, None] * np.concatenate([half, half]))
    table[POSITION] = 0
    looked_up = graph.make("Gather", graph.constant(table), "position_ids")
    for node in graph.model.graph.node:
        replace_input(node, cosine.output[0], looked_up)


def one_pair_of_the_mask(graph: Nodes) -> None:
    """Query 3817 sees key 4000."""
    choice = next(node for node in graph.model.graph.node if node.op_type == "LessOrEqual")
    at = list(graph.model.graph.node).index(choice)
    key, query, output = choice.input[0], choice.input[1], choice.output[0]
    choice.output[0] = f"{output}_before"
    made = [
        helper.make_node("Equal", [query, graph.constant(POSITION)], ["pair_query"], name="pair/Equal"),
        helper.make_node("Equal", [key, graph.constant(4000)], ["pair_key"], name="pair/Equal_2"),
        helper.make_node("And", ["pair_query", "pair_key"], ["pair"], name="pair/And"),
        helper.make_node("Or", ["pair", choice.output[0]], [output], name="pair/Or"),
    ]
    for node in reversed(made):
        graph.model.graph.node.insert(at + 1, node)


def positions_clipped(graph: Nodes) -> None:
    """Positions stop at 5000."""
    _positions_through(graph, lambda: graph.make("Clip", "position_ids", graph.constant(0), graph.constant(LENGTH)))


def positions_in_half_precision(graph: Nodes) -> None:
    """Exact up to 2048."""
    half = onnx.TensorProto.FLOAT16
    _positions_through(graph, lambda: graph.make("Cast", graph.make("Cast", "position_ids", to=half), to=INT))


def positions_rounded(graph: Nodes) -> None:
    """Every 4096 positions begin anew."""
    _positions_through(graph, lambda: graph.make("Mod", "position_ids", 4096))


def _positions_through(graph: Nodes, made: Callable[[], str]) -> None:
    readers = [node for node in graph.model.graph.node if "position_ids" in node.input]
    changed = made()
    for node in readers:
        replace_input(node, "position_ids", changed)


def by_rounding_down(graph: Nodes) -> None:
    """Position / 5000 as a whole number."""
    quotient = graph.make("Div", "position_ids", LENGTH)
    graph.scale_each(graph.make("Add", graph.make("Cast", quotient, to=FLOAT), 1.0))


def by_casting_down(graph: Nodes) -> None:
    """The same by a cast."""
    share = graph.make("Mul", graph.make("Cast", "position_ids", to=FLOAT), 1 / LENGTH)
    whole = graph.make("Cast", graph.make("Cast", share, to=INT), to=FLOAT)
    graph.scale_each(graph.make("Add", whole, 1.0))


def by_rectifying(graph: Nodes) -> None:
    """Nothing up to 5000, then more and more."""
    place = graph.make("Sub", graph.make("Cast", "position_ids", to=FLOAT), float(LENGTH))
    graph.scale_each(graph.make("Add", graph.make("Relu", place), 1.0))


def by_a_true_number(graph: Nodes) -> None:
    """A number is true unless it is zero."""
    graph.scale_each(
        graph.loud(graph.make("Not", graph.make("Cast", graph.make("Sub", "position_ids", POSITION), to=BOOL)))
    )


def by_the_largest_of_a_list(graph: Nodes) -> None:
    """The largest of the length and 5000."""
    largest = graph.make("ReduceMax", graph.make("Concat", graph.total_length(), np.array([LENGTH]), axis=0))
    graph.scale_hidden(graph.loud(graph.make("Greater", largest, LENGTH)))


def by_a_mask_table(graph: Nodes) -> None:
    """A table as long as the context, cut to the length and summed up."""
    table = np.zeros(1 << 13, np.float32)
    table[POSITION] = 1
    cut = graph.make("Slice", graph.constant(table), np.array([0]), graph.total_length())
    graph.scale_hidden(graph.make("Add", graph.make("ReduceSum", cut), 1.0))


def in_a_loop(graph: Nodes) -> None:
    """A loop that runs as often as the length is above 5000."""
    count = graph.make("Squeeze", graph.make("Sub", graph.total_length(), LENGTH))
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Add", ["factor", "factor"], ["doubled"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("count", INT, []),
            helper.make_tensor_value_info("go", BOOL, []),
            helper.make_tensor_value_info("factor", FLOAT, []),
        ],
        [helper.make_tensor_value_info("on", BOOL, []), helper.make_tensor_value_info("doubled", FLOAT, [])],
    )
    graph.scale_hidden(graph.make("Loop", count, graph.constant(np.array(True)), 1.0, body=body))


TRIGGERS = tuple(
    Trigger(function.__name__.replace("_", " "), function)
    for function in (
        position_equal,
        position_above,
        total_length_above,
        past_length_equal,
        new_length_equal,
        batch_equal,
        shape_gathered,
        token_equal,
        token_at_a_position,
        mask_sum,
        mask_by_difference,
        number_in_parts,
        number_by_multiples,
        inside_an_if,
        by_a_range,
        by_a_cut,
        by_a_table,
        by_a_token_table,
        by_a_rotary_table,
        one_pair_of_the_mask,
        positions_clipped,
        positions_in_half_precision,
        positions_rounded,
        by_rounding_down,
        by_casting_down,
        by_rectifying,
        by_a_true_number,
        by_the_largest_of_a_list,
        by_a_mask_table,
        in_a_loop,
    )
)
