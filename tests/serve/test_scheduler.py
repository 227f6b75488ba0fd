"""The scheduler: turns of one step, limits of active and waiting jobs, and shutdown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from llmconv.errors import InputRefused
from llmconv.serve.fields import ApiError
from llmconv.serve.scheduler import Job, Scheduler


@asynccontextmanager
async def running(active: int = 2, waiting: int = 2) -> AsyncIterator[Scheduler]:
    """A scheduler with a running thread."""
    scheduler = Scheduler(active, waiting)
    scheduler.start()
    try:
        yield scheduler
    finally:
        await asyncio.to_thread(scheduler.stop)
        assert not scheduler.is_running


async def drained(job: Job[int]) -> list[int | None]:
    """All items of a job."""
    return [item async for item in job.items()]


class Endless:
    """Endless steps that record whether they were closed."""

    def __init__(self) -> None:
        self.count, self.closed = 0, threading.Event()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        time.sleep(0.001)
        self.count += 1
        return self.count

    def close(self) -> None:
        self.closed.set()


def test_active_jobs_take_turns() -> None:
    order: list[str] = []
    gate = threading.Event()

    def steps(name: str) -> Iterator[int]:
        gate.wait(10)
        for number in range(3):
            order.append(name)
            yield number

    async def both() -> None:
        async with running() as scheduler:
            jobs = [scheduler.submit(steps(name)) for name in "ab"]
            gate.set()
            assert [await drained(job) for job in jobs] == [[0, 1, 2]] * 2

    asyncio.run(both())
    assert "".join(order) == "ababab"


def test_a_job_beyond_the_queue_gets_a_retry_time() -> None:
    async def crowd() -> ApiError:
        async with running(active=1, waiting=1) as scheduler:
            kept = [scheduler.submit(Endless()) for _ in range(2)]
            with pytest.raises(ApiError) as caught:
                scheduler.submit(Endless())
            kept[1].cancel()  # who waits and leaves makes room
            scheduler.submit(Endless())
            return caught.value

    error = asyncio.run(crowd())
    assert (error.status, error.code) == (429, "queue_full")
    assert int(error.headers["Retry-After"]) >= 1


def test_a_canceled_job_is_closed_and_its_place_is_free() -> None:
    async def leave() -> None:
        async with running(active=1, waiting=1) as scheduler:
            steps = Endless()
            job = scheduler.submit(steps)
            async for _ in job.items():
                break
            job.cancel()
            assert await drained(scheduler.submit(iter([1, 2]))) == [1, 2]
            assert steps.closed.is_set()

    asyncio.run(leave())


def test_a_failing_job_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    def failing(error: Exception) -> Iterator[int]:
        yield 1
        raise error

    async def fail() -> None:
        async with running() as scheduler:
            other = scheduler.submit(iter(range(50)))
            for error in (InputRefused("no", hint="hint"), ZeroDivisionError("oh")):
                with pytest.raises(type(error)):
                    await drained(scheduler.submit(failing(error)))
            assert await drained(other) == list(range(50))

    asyncio.run(fail())
    assert [record.message for record in caplog.records] == ["an answer failed"]  # the defect, not the refusal


def test_a_call_gives_its_result_or_its_error_between_steps() -> None:
    async def call() -> None:
        async with running() as scheduler:
            scheduler.submit(Endless())
            assert await scheduler.call(lambda: threading.current_thread().name) == "llmconv-prompts"
            with pytest.raises(ZeroDivisionError):
                await scheduler.call(lambda: 1 // 0)

    asyncio.run(call())


def test_the_place_of_an_answer_is_free_when_its_client_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def one_after_another() -> None:
        loop = asyncio.get_running_loop()
        deliver = loop.call_soon_threadsafe

        def deliver_and_pause(*arguments: Any) -> None:  # so the client is always faster than the thread
            deliver(*arguments)
            time.sleep(0.01)

        monkeypatch.setattr(loop, "call_soon_threadsafe", deliver_and_pause)
        async with running(active=1, waiting=0) as scheduler:
            for number in range(3):
                assert await scheduler.call(lambda: "a prompt") == "a prompt"
                assert await drained(scheduler.submit(iter([number]))) == [number]

    asyncio.run(one_after_another())


def test_calls_wait_in_the_queue_and_those_of_clients_that_left_are_not_made() -> None:
    made: list[str] = []
    gate = threading.Event()

    async def crowd() -> None:
        async with running(active=1, waiting=2) as scheduler:
            first = asyncio.create_task(scheduler.call(lambda: gate.wait(10)))
            others = [asyncio.create_task(scheduler.call(partial(made.append, name))) for name in "ab"]
            await asyncio.sleep(0)
            assert scheduler.load() == {"active": 0, "waiting": 3}
            with pytest.raises(ApiError) as caught:
                await scheduler.call(lambda: made.append("c"))
            assert caught.value.status == 429
            others[0].cancel()
            await asyncio.sleep(0)
            assert scheduler.load()["waiting"] == 2
            gate.set()
            await asyncio.gather(first, others[1])
            assert scheduler.load()["waiting"] == 0

    asyncio.run(crowd())
    assert made == ["b"]


def test_answers_go_on_while_a_prompt_is_prepared() -> None:
    gate = threading.Event()

    async def both() -> None:
        async with running() as scheduler:
            call = asyncio.create_task(scheduler.call(lambda: gate.wait(30)))
            await asyncio.sleep(0)
            assert await drained(scheduler.submit(iter(range(3)))) == [0, 1, 2]
            gate.set()
            assert await call

    asyncio.run(both())


def test_none_is_yielded_when_nothing_arrives() -> None:
    def slow() -> Iterator[int]:
        time.sleep(0.15)
        yield 1

    async def listen() -> list[int | None]:
        async with running() as scheduler:
            return [item async for item in scheduler.submit(slow()).items(every=0.05)]

    found = asyncio.run(listen())
    assert (found[0], found[-1]) == (None, 1)


def test_draining_finishes_active_jobs_refuses_waiting_ones_and_ends_the_rest() -> None:
    async def drain() -> None:
        async with running(active=2, waiting=2) as scheduler:
            endless = Endless()
            long, short = scheduler.submit(endless), scheduler.submit(iter(range(20)))
            waiting = scheduler.submit(iter([1]))
            scheduler.drain(0.3)
            with pytest.raises(ApiError, match="shutting down"):
                scheduler.submit(iter([1]))
            assert await drained(short) == list(range(20))
            for job in (waiting, long):
                with pytest.raises(ApiError, match="shutting down"):
                    await drained(job)
            assert endless.closed.is_set()

    asyncio.run(drain())
