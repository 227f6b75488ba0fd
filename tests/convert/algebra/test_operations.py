"""Rename tables and lazy operations."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from llmconv.convert.algebra import (
    concat,
    equal,
    fuse,
    inverse_order,
    inverted,
    permute_rows,
    rename,
    replicated,
    require,
    rope_order,
    split,
)
from llmconv.errors import MalformedInput
from llmconv.tensors import BLOCK_BYTES, BY_NAME, Array, LazyTensor, in_memory

TABLE = {"in.{}.weight": "out.{}.w", "head": "head", "freqs": None}


def lazy(array: Array) -> LazyTensor:
    return in_memory(array, BY_NAME["float32"])


def numbers(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_names_are_renamed_by_number_and_dropped_where_the_table_says_so() -> None:
    assert rename(["in.7.weight", "freqs", "head"], TABLE, "x") == {"out.7.w": "in.7.weight", "head": "head"}


def test_a_name_that_no_rule_places_is_an_error_that_lists_it() -> None:
    with pytest.raises(MalformedInput, match="1 tensors that no rule places; unexpected keys: `in.7.bias`"):
        rename(["in.7.bias", "head"], TABLE, "x")


def test_two_names_with_one_target_are_an_error() -> None:
    with pytest.raises(MalformedInput, match="both `head`"):
        rename(["head", "tail"], {"head": "head", "tail": "head"}, "x")


def test_a_target_that_nobody_produced_is_an_error_that_counts_the_rest() -> None:
    with pytest.raises(MalformedInput, match="lacks 7 tensors of the model; missing keys: `t0`, .* and 2 more"):
        require([f"t{number}" for number in range(7)], {}, "x")


@pytest.mark.slow
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


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 1), st.data())
def test_split_undoes_concat(count: int, size: int, dim: int, data: st.DataObject) -> None:
    whole = numbers(*((size * count, 3) if dim == 0 else (3, size * count)))
    parts = split(lazy(whole), dim, count)
    expected = np.split(whole, count, axis=dim)
    start = data.draw(st.integers(0, parts[0].num_rows - 1))
    stop = data.draw(st.integers(start + 1, parts[0].num_rows))
    for part, array in zip(parts, expected, strict=True):
        assert part.shape == array.shape
        assert np.array_equal(part.rows(start, stop), array[start:stop])
    assert np.array_equal(concat(parts, dim).read(), whole)


def test_columns_are_read_by_no_more_than_a_block() -> None:
    asked: list[int] = []

    def load(start: int, stop: int) -> Array:
        asked.append(stop - start)
        return np.full((stop - start, 1 << 18), start, np.float32)

    part = split(LazyTensor(BY_NAME["float32"], (64, 1 << 18), load), 1, 2)[1]
    assert part.rows(3, 60).shape == (57, 1 << 17)
    assert sum(asked) == 57 and max(asked) == BLOCK_BYTES >> 20


@pytest.mark.parametrize("dim", [0, 1])
def test_a_size_that_does_not_divide_is_an_error(dim: int) -> None:
    with pytest.raises(ValueError, match=f"no 2 equal parts along dim {dim}"):
        split(lazy(numbers(3, 3)), dim, 2)


@pytest.mark.slow
@given(st.permutations(range(8)))
def test_the_inverse_order_undoes_an_order(order: list[int]) -> None:
    array = numbers(16, 2)
    there = permute_rows(lazy(array), order)
    assert np.array_equal(permute_rows(there, inverse_order(order)).read(), array)


def test_an_inverted_table_renames_back() -> None:
    names = rename(["in.7.weight", "head"], TABLE, "x")
    assert rename(names, inverted(TABLE), "x") == {source: target for target, source in names.items()}


def test_rope_rows_of_a_head_of_four() -> None:
    assert rope_order(4) == (0, 2, 1, 3)


@pytest.mark.slow
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


@pytest.mark.parametrize("size", [0, 1, -2, 1 << 60])
def test_a_head_of_no_possible_size_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match="a head has"):
        rope_order(size)


@pytest.mark.parametrize("layer", ["9" * 10, "9" * 5000])
def test_a_number_that_no_layer_has_is_placed_nowhere(layer: str) -> None:
    with pytest.raises(MalformedInput, match="no rule places"):
        rename([f"in.{layer}.weight"], TABLE, "x")


DIFFERENCE = MalformedInput("`x` holds different copies of `a`", hint="copy it again")


def test_copies_are_compared_while_they_are_read() -> None:
    one, other = numbers(4, 2), numbers(4, 2)
    assert np.array_equal(replicated([lazy(one), lazy(one)], DIFFERENCE).read(), one)
    other[3, 1] = -1
    differing = replicated([lazy(one), lazy(other)], DIFFERENCE)
    assert np.array_equal(differing.rows(0, 3), one[:3])
    with pytest.raises(MalformedInput, match="different copies"):
        differing.rows(3, 4)


def test_equality_is_of_bits() -> None:
    nan = np.array([np.nan], dtype=np.float32)
    assert equal(lazy(nan), lazy(nan))
    assert not equal(lazy(np.array([0.0], dtype=np.float32)), lazy(np.array([-0.0], dtype=np.float32)))


@pytest.mark.parametrize(
    ("rows", "counts", "fits"),
    [
        ((4, 4), (), True),
        ((3, 5), (), False),
        ((8, 2, 2), (), True),
        ((8, 1, 3), (), False),
        ((7, 2, 2), (), False),
        ((8, 2, 2), (4, 1, 1), True),
        ((10, 1, 1), (4, 1, 1), False),
        ((4, 4, 4), (1, 1, 1), True),
        ((6, 3, 3), (1, 1, 1), False),
    ],
)
def test_parts_are_joined_only_at_their_own_rows(rows: tuple[int, ...], counts: tuple[int, ...], fits: bool) -> None:
    parts = [f"p{number}" for number in range(len(rows))]
    tensors = {f"a.{part}.weight": lazy(np.ones((size, 2), np.float32)) for part, size in zip(parts, rows, strict=True)}
    if fits:
        assert fuse(tensors, parts, "all", counts=counts)["a.all.weight"].shape == (sum(rows), 2)
    else:
        with pytest.raises(ValueError, match="rows"):
            fuse(tensors, parts, "all", counts=counts)
