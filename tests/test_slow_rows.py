"""Which rows of a slow test run by default."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.builders.slow_rows import each_value

LETTERS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3).map(tuple)


@given(st.lists(st.tuples(LETTERS, st.integers(0, 4)), min_size=1, max_size=30))
def test_every_value_of_every_parameter_is_in_a_chosen_row(rows: list[tuple[tuple[str, ...], int]]) -> None:
    named = [{"letters": letters, "number": number} for letters, number in rows]
    chosen = [rows[at] for at in each_value(named)]
    for axis in (0, 1):
        assert {row[axis] for row in chosen} == {row[axis] for row in rows}


def test_a_grid_needs_as_many_rows_as_its_longest_axis_and_spreads_them() -> None:
    rows = [{"family": family, "fault": fault} for family, fault in product("abc", range(9))]
    chosen = [rows[at]["family"] for at in each_value(rows)]
    assert len(chosen) == 9 and {chosen.count(family) for family in "abc"} == {3}


def test_a_list_without_repeated_values_is_kept_whole() -> None:
    assert each_value([{"kind": kind} for kind in "abcdef"]) == list(range(6))
