"""Rows picked, and interleaved are numpy's, in every row range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from llmconv.convert import algebra
from llmconv.convert.algebra import interleave_rows, pick_rows
from llmconv.tensors import BY_NAME, LazyTensor, in_memory


def tensor(*shape: int) -> tuple[Any, LazyTensor]:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return array, in_memory(array, BY_NAME["float32"])


def assert_rows(lazy: LazyTensor, expected: Any) -> None:
    assert lazy.shape == expected.shape
    for start in range(len(expected)):
        for stop in range(start + 1, len(expected) + 1):
            rows = lazy.rows(start, stop)
            assert rows.flags.c_contiguous and np.array_equal(rows, expected[start:stop])


@settings(deadline=None, max_examples=60)
@given(
    groups=st.integers(1, 4),
    first=st.integers(0, 3),
    count=st.integers(1, 3),
    rest=st.integers(0, 2),
    wide=st.booleans(),
)
def test_rows_are_picked_from_every_group(groups: int, first: int, count: int, rest: int, wide: bool) -> None:
    group = first + count + rest
    array, lazy = tensor(groups * group, 3) if wide else tensor(groups * group)
    expected = array.reshape(groups, group, *array.shape[1:])[:, first : first + count].reshape(-1, *array.shape[1:])
    assert_rows(pick_rows(lazy, group, first, count), expected)


def test_large_groups_are_read_without_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "BLOCK_BYTES", 1)
    array, lazy = tensor(12, 3)
    asked: list[tuple[int, int]] = []

    def spied(start: int, stop: int) -> Any:
        asked.append((start, stop))
        return lazy.rows(start, stop)

    picked = pick_rows(LazyTensor(lazy.dtype, lazy.shape, spied), 6, 1, 2)
    assert_rows(picked, array.reshape(2, 6, 3)[:, 1:3].reshape(-1, 3))
    assert max(stop - start for start, stop in asked) == 2


@pytest.mark.parametrize("wide", [True, False])
def test_interleaving_undoes_picking(wide: bool) -> None:
    array, lazy = tensor(24, 2) if wide else tensor(24)
    counts = [3, 1, 2]
    parts = [pick_rows(lazy, 6, sum(counts[:part]), counts[part]) for part in range(3)]
    assert_rows(interleave_rows(parts, counts), array)


WRONG: list[Callable[[], object]] = [
    lambda: pick_rows(tensor(7, 2)[1], 2, 0, 1),
    lambda: pick_rows(tensor(8, 2)[1], 2, 1, 2),
    lambda: interleave_rows([tensor(4, 2)[1], tensor(6, 2)[1]], [2, 2]),
    lambda: interleave_rows([tensor(5, 2)[1], tensor(5, 2)[1]], [2, 2]),
]


@pytest.mark.parametrize("call", WRONG)
def test_what_does_not_fit_is_an_error(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="row|interleave"):
        call()
