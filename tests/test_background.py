"""Prefetching and the background queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from llmconv.background import BackgroundQueue, prefetch


def late(number: int) -> int:
    time.sleep(0.002 * (5 - number % 5))
    return number


def slowly(ran: list[int], number: int) -> None:
    time.sleep(0.01)
    ran.append(number)


def failing() -> int:
    raise ValueError("bad")


def test_results_are_in_order_however_long_each_takes() -> None:
    assert list(prefetch((partial(late, number) for number in range(30)), 4)) == list(range(30))


def test_no_more_jobs_are_taken_than_the_depth_allows() -> None:
    taken: list[int] = []

    def jobs() -> Iterator[Callable[[], int]]:
        for number in range(100):
            taken.append(number)
            yield partial(late, number)

    results = prefetch(jobs(), 3)
    next(results)
    assert len(taken) == 4
    results.close()  # type: ignore[attr-defined]


def test_an_error_comes_after_the_results_before_it_and_leaves_no_thread() -> None:
    before = threading.active_count()
    seen: list[int] = []
    with pytest.raises(ValueError, match="bad"):
        jobs: list[Callable[[], int]] = [partial(late, 0), partial(late, 1), failing, *[partial(late, 2)] * 50]
        for number in prefetch(jobs, 8):
            seen.append(number)
    assert seen == [0, 1] and threading.active_count() == before


def test_an_interrupted_caller_leaves_no_job_running() -> None:
    before = threading.active_count()
    ran: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        for _ in prefetch([partial(ran.append, number) for number in range(1000)], 4):
            raise KeyboardInterrupt
    assert len(ran) <= 5 and threading.active_count() == before


def test_queued_jobs_run_in_order_and_their_error_is_raised() -> None:
    ran: list[int] = []
    with BackgroundQueue(2) as queue:
        for number in range(20):
            queue.submit(ran.append, number)
        queue.finish()
        assert ran == list(range(20)) and queue.is_idle()
        queue.submit(list[int]().remove, 9)
        with pytest.raises(ValueError):
            queue.finish()


def test_leaving_the_queue_early_cancels_what_has_not_started() -> None:
    ran: list[int] = []
    with BackgroundQueue(100) as queue:
        for number in range(50):
            queue.submit(slowly, ran, number)
    assert len(ran) < 50
