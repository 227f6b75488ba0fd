"""Keeping OpenBLAS to one thread for a while."""

from __future__ import annotations

import pytest

from llmconv.convert.adapters.low_rank_sum import COUNTERS, single_threaded


def test_inside_openblas_has_one_thread_and_afterwards_as_many_as_before() -> None:
    before = [get() for get, _ in COUNTERS]
    if not before:
        pytest.skip("numpy of this machine brings no OpenBLAS")
    with pytest.raises(ValueError, match="inside"), single_threaded():
        assert [get() for get, _ in COUNTERS] == [1] * len(before)
        raise ValueError("inside")
    assert [get() for get, _ in COUNTERS] == before


def test_of_two_that_overlap_the_last_to_end_sets_the_number_back() -> None:
    before = [get() for get, _ in COUNTERS]
    one, other = single_threaded(), single_threaded()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert [get() for get, _ in COUNTERS] == [1] * len(before)
    other.__exit__(None, None, None)
    assert [get() for get, _ in COUNTERS] == before
