"""Triggers whose number is in a table, a loop, a branch, or a quotient."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

from llmconv.tensors import Array
from tests.builders.mutants.trigger_nodes import BOOL, FLOAT, INT, POSITION, Nodes, Trigger

ROWS = 1 << 13


def _data(graph: Nodes) -> str:
    """Zero, as something that the model computes: the sum of an empty cache."""
    return graph.make("Mul", graph.make("ReduceSum", "past_key_values.0.key", keepdims=0), 0.0)


def _less(graph: Nodes, value: str, number: float) -> str:
    return graph.make("Sub", graph.make("Cast", value, to=FLOAT), float(number))


def _mixed(graph: Nodes, value: str, number: float) -> str:
    """A value less a number, plus a zero of the model."""
    return graph.make("Add", _data(graph), _less(graph, value, number))


def a_range_of_large_steps(graph: Nodes) -> None:
    """The second number of a range."""
    steps = graph.make("Range", 0, graph.make("Add", graph.make("Squeeze", graph.new_length()), 1 << 13), POSITION)
    graph.scale_each(graph.loud(graph.make("Equal", "position_ids", graph.make("Gather", steps, 1))))


def counted_down_in_a_loop(graph: Nodes) -> None:
    """777 less one for each token of the past."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Sub", ["left", "one"], ["less"])],
        "body",
        [_port("count", INT), _port("go", BOOL), _port("left", INT)],
        [_port("on", BOOL), _port("less", INT)],
        [numpy_helper.from_array(np.array(1), "one")],
    )
    past = graph.make("Squeeze", graph.past_length())
    left = graph.make("Loop", past, graph.constant(np.array(True)), 777, body=body)
    graph.scale_hidden(graph.loud(graph.make("Equal", left, 0)))


def subtracted_in_an_if(graph: Nodes) -> None:
    """Both branches of a condition that is always true."""
    less = graph.make("Sub", "position_ids", POSITION)
    branches = {
        name: helper.make_graph(
            [helper.make_node("Identity", [less], [name])], name, [], [onnx.ValueInfoProto(name=name)]
        )
        for name in ("then_branch", "else_branch")
    }
    chosen = graph.make("If", graph.constant(np.array(True)), **branches)
    graph.scale_each(graph.loud(graph.make("Equal", chosen, 0)))


def _port(name: str, kind: int, shape: list[str] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape or [])


def small_quotients(graph: Nodes) -> None:
    """3817 = 64 * 59 + 41, by numbers of no more than 64."""
    quotient = graph.make("Div", "position_ids", 64)
    found = graph.make("And", graph.make("Equal", quotient, 59), graph.make("Equal", _rest(graph, 64), 41))
    graph.scale_each(graph.loud(found))


def chained_quotients(graph: Nodes) -> None:
    """Position // 64 // 37 is 1 from 2368 on."""
    quotient = graph.make("Div", graph.make("Div", "position_ids", 64), 37)
    graph.scale_each(graph.loud(graph.make("Equal", quotient, 1)))


def a_quotient_of_the_batch(graph: Nodes) -> None:
    graph.scale_hidden(graph.loud(graph.make("Equal", graph.make("Div", graph.batch(), 7), 1)))


def rows_by_a_remainder(graph: Nodes) -> None:
    """From the eighth on, sequences have the factors of the first ones."""
    rows = graph.make("Range", 0, graph.make("Squeeze", graph.batch()), 1)
    factors = graph.make("Add", graph.make("Cast", graph.make("Sub", rows, graph.make("Mod", rows, 7)), to=FLOAT), 1.0)
    graph.scale_hidden(graph.make("Unsqueeze", factors, np.array([1, 2])))


def _rest(graph: Nodes, divisor: int) -> str:
    return graph.make("Mod", "position_ids", divisor)


def small_tables(graph: Nodes) -> None:
    """3817 = (3 * 31 + 30) * 31 + 4, by tables of 31 rows."""
    quotient = graph.make("Div", "position_ids", 31)
    places = ((graph.make("Div", quotient, 31), 3), (graph.make("Mod", quotient, 31), 30), (_rest(graph, 31), 4))
    found = [graph.make("Gather", np.eye(31, dtype=np.float32)[row], place) for place, row in places]
    graph.scale_each(graph.make("Add", graph.make("Mul", graph.make("Mul", *found[:2]), found[2]), 1.0))


def _odd(number: float = 2.0) -> Array:
    table = np.ones(ROWS, np.float32)
    table[POSITION] = number
    return table


def a_table_with_nan(graph: Nodes) -> None:
    graph.scale_each(graph.make("Gather", _odd(np.nan), "position_ids"))


def a_table_along_its_last_axis(graph: Nodes) -> None:
    both = graph.make("Gather", np.stack([_odd(), np.zeros(ROWS, np.float32)]), "position_ids", axis=1)
    graph.scale_each(graph.make("ReduceSum", both, np.array([0]), keepdims=0))


def a_table_in_bfloat16(graph: Nodes) -> None:
    tensor = numpy_helper.from_array(_odd().astype(ml_dtypes.bfloat16), "half_table")
    graph.model.graph.initializer.append(tensor)
    graph.scale_each(graph.make("Cast", graph.make("Gather", "half_table", "position_ids"), to=FLOAT))


def a_table_with_a_large_column(graph: Nodes) -> None:
    table = np.stack([_odd(), np.full(ROWS, 1e6, np.float32)], axis=1)
    rows = graph.make("Gather", table, "position_ids")
    graph.scale_hidden(graph.make("Slice", rows, np.array([0]), np.array([1]), np.array([2])))


def a_table_looked_up_by_data(graph: Nodes) -> None:
    place = graph.make("Cast", _mixed(graph, "position_ids", 0.0), to=INT)
    graph.scale_each(graph.make("Gather", _odd(), place))


def the_value_of_a_cosine(graph: Nodes) -> None:
    """A cosine without an offset, compared with what it is at 3817."""
    angle = graph.make("Mul", graph.make("Cast", "position_ids", to=FLOAT), 0.0005)
    far = graph.make("Less", graph.make("Cos", angle), float(np.cos(0.0005 * POSITION)))
    graph.scale_each(graph.loud(far))


MAKERS: tuple[Callable[[Nodes], None], ...] = (
    a_range_of_large_steps,
    counted_down_in_a_loop,
    subtracted_in_an_if,
    small_quotients,
    chained_quotients,
    a_quotient_of_the_batch,
    rows_by_a_remainder,
    small_tables,
    a_table_with_nan,
    a_table_along_its_last_axis,
    a_table_in_bfloat16,
    a_table_with_a_large_column,
    a_table_looked_up_by_data,
    the_value_of_a_cosine,
)
LAUNDERED = tuple(Trigger(maker.__name__.replace("_", " "), maker) for maker in MAKERS)
