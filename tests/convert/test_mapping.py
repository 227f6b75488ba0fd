"""Rename tables and lazy operations."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from llmconv.convert.mapping import concat, equal, permute_rows, rename, replicated, require, rope_order
from llmconv.errors import MalformedInput
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory

TABLE = {"in.{}.weight": "out.{}.w", "head": "head", "freqs": None}


def lazy(array: Array) -> LazyTensor:
    return in_memory(array, BY_NAME["float32"])


def numbers(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_names_are_renamed_by_number_and_dropped_where_the_table_says_so() -> None:
    assert rename(["in.7.weight", "freqs", "head"], TABLE, "x") == {"out.7.w": "in.7.weight", "head": "head"}


def test_a_name_that_no_rule_places_is_an_error_that_lists_it() -> None:
    with pytest.raises(MalformedInput, match="1 tensors that no rule places: `in.7.bias`"):
        rename(["in.7.bias", "head"], TABLE, "x")


def test_two_names_with_one_target_are_an_error() -> None:
    with pytest.raises(MalformedInput, match="both `head`"):
        rename(["head", "tail"], {"head": "head", "tail": "head"}, "x")


def test_a_target_that_nobody_produced_is_an_error_that_counts_the_rest() -> None:
    with pytest.raises(MalformedInput, match="lacks 7 tensors of the model: `t0`, .* and 2 more"):
        require([f"t{number}" for number in range(7)], {}, "x")


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 1), st.data())
def test_rows_of_a_concatenation_are_rows_of_the_whole(count: int, rows: int, dim: int, data: st.DataObject) -> None:
    parts = [numbers(rows, 3) + 100 * number for number in range(count)]
    whole = np.concatenate(parts, axis=dim)
    joined = concat([lazy(part) for part in parts], dim)
    start = data.draw(st.integers(0, joined.num_rows - 1))
    stop = data.draw(st.integers(start + 1, joined.num_rows))
    assert joined.shape == whole.shape
    assert np.array_equal(joined.rows(start, stop), whole[start:stop])


def test_parts_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ValueError, match="cannot join"):
        concat([lazy(numbers(2, 3)), lazy(numbers(2, 4))], 0)


def test_rope_rows_of_a_head_of_four() -> None:
    assert rope_order(4) == (0, 2, 1, 3)


@settings(deadline=None)
@given(st.integers(1, 3), st.sampled_from([2, 4, 8]), st.data())
def test_permuted_rows_equal_the_reshape_that_transformers_uses(heads: int, size: int, data: st.DataObject) -> None:
    array = numbers(heads * size, 3)
    expected = array.reshape(heads, size // 2, 2, 3).swapaxes(1, 2).reshape(array.shape)
    permuted = permute_rows(lazy(array), rope_order(size))
    start = data.draw(st.integers(0, len(array) - 1))
    stop = data.draw(st.integers(start + 1, len(array)))
    assert np.array_equal(permuted.rows(start, stop), expected[start:stop])


def test_rows_that_do_not_divide_into_groups_are_an_error() -> None:
    with pytest.raises(ValueError, match="6 rows do not divide"):
        permute_rows(lazy(numbers(6, 2)), rope_order(4))


def test_copies_are_compared_while_they_are_read() -> None:
    one, other = numbers(4, 2), numbers(4, 2)
    assert np.array_equal(replicated([lazy(one), lazy(one)], "x").read(), one)
    other[3, 1] = -1
    differing = replicated([lazy(one), lazy(other)], "x")
    assert np.array_equal(differing.rows(0, 3), one[:3])
    with pytest.raises(MalformedInput, match="different copies"):
        differing.rows(3, 4)


def test_equality_is_of_bits() -> None:
    nan = np.array([np.nan], dtype=np.float32)
    assert equal(lazy(nan), lazy(nan))
    assert not equal(lazy(np.array([0.0], dtype=np.float32)), lazy(np.array([-0.0], dtype=np.float32)))
