"""Simulation of hosts that write shards: a network card, tasks that share it, slow hosts and one that dies.

Deterministic, and fluid: between two events every task moves bytes at a constant rate.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

Sizes = tuple[int, ...]
"""Bytes of the shards of one task, in order."""


@dataclass(frozen=True)
class Cluster:
    """Equal hosts, and what happens to them.

    Attributes:
        nic: bytes per second of a host, each way.
        task_rate: bytes per second of a task that is alone on a host.
        slots: tasks that a host runs at once.
        start: seconds of the first task of a slot: a process starts, and plans.
        again: seconds before a further task in the same slot.
        hosts: number of them.
        speeds: of hosts that are not as fast as the others, by number; 0.5 for half as fast in everything.
        dies: number of a host and the second at which it dies.
        noticed: seconds until the scheduler gives its tasks to others.
    """

    nic: float
    task_rate: float
    slots: int
    start: float
    again: float
    hosts: int = 16
    speeds: dict[int, float] = field(default_factory=dict)
    dies: tuple[int, float] | None = None
    noticed: float = 0

    def speed(self, host: int) -> float:
        """Of a host, relative to the others."""
        return self.speeds.get(host, 1)


@dataclass
class Task:
    """One that runs.

    Attributes:
        sizes: bytes of the shards that are left, the first of which it writes.
        waits: seconds until it writes.
        left: bytes of its shard that are left.
    """

    sizes: deque[int]
    waits: float
    left: float


@dataclass
class Outcome:
    """What a simulation found.

    Attributes:
        seconds: until the last shard was written.
        ended: by host, the second at which it had nothing left to do.
        written: how often a shard of a size was finished.
        lost: bytes that a dead host had moved of shards it did not finish.
    """

    seconds: float = 0
    ended: dict[int, float] = field(default_factory=dict)
    written: Counter[int] = field(default_factory=Counter)
    lost: float = 0

    def waiting(self) -> float:
        """Seconds from when the mean host had nothing left to do to the end: lost by stragglers."""
        return self.seconds - sum(self.ended.values()) / len(self.ended)


class Simulation:
    """One run.

    Args:
        cluster: the hosts.
        own: the tasks of each host, which no other takes while it lives.
        shared: tasks for whichever host is free.
    """

    def __init__(self, cluster: Cluster, own: Sequence[Iterable[Sizes]], shared: Iterable[Sizes]) -> None:
        self._cluster, self._shared = cluster, deque(shared)
        self._own = [deque(tasks) for tasks in own] or [deque() for _ in range(cluster.hosts)]
        self._running: list[list[Task]] = [[] for _ in range(cluster.hosts)]
        self._started, self._now, self.outcome = [0] * cluster.hosts, 0.0, Outcome()
        self._dead: int | None = None
        self._orphans: list[Sizes] = []

    def run(self) -> Outcome:
        """Until all shards are written."""
        self._assign()
        for second, event in self._events():
            while self._now < second and (second < inf or any(self._running)):
                self._advance(min(self._next(), second - self._now))
            event()
            self._assign()
        self.outcome.seconds = max(self.outcome.ended.values())
        return self.outcome

    def _events(self) -> list[tuple[float, Callable[[], object]]]:
        if not self._cluster.dies:
            return [(inf, tuple)]
        second = self._cluster.dies[1]
        return [(second, self._die), (second + self._cluster.noticed, self._hand_over), (inf, tuple)]

    def _assign(self) -> None:
        """Starts tasks on free slots, the first of all hosts before the second of any."""
        for slot in range(self._cluster.slots):
            for host, running in enumerate(self._running):
                waiting = self._own[host] or self._shared
                if len(running) == slot and host != self._dead and waiting:
                    self._start(host, waiting.popleft())

    def _start(self, host: int, sizes: Sizes) -> None:
        again = self._started[host] >= self._cluster.slots
        self._started[host] += 1
        self._running[host].append(Task(deque(sizes), self._cluster.again if again else self._cluster.start, sizes[0]))

    def _rate(self, host: int) -> float:
        """Bytes per second of every task of a host that is writing."""
        writing = sum(task.waits <= 0 for task in self._running[host])
        return self._cluster.speed(host) * min(self._cluster.task_rate, self._cluster.nic / max(writing, 1))

    def _next(self) -> float:
        """Seconds to the next change."""
        return min(
            (
                task.waits / self._cluster.speed(host) if task.waits > 0 else task.left / self._rate(host)
                for host, running in enumerate(self._running)
                for task in running
            ),
            default=inf,
        )

    def _advance(self, seconds: float) -> None:
        rates = [self._rate(host) * seconds for host in range(self._cluster.hosts)]
        self._now += seconds
        for host, running in enumerate(self._running):
            for task in running:
                if task.waits > 0:
                    task.waits = _rest(task.waits, seconds * self._cluster.speed(host))
                else:
                    task.left = _rest(task.left, rates[host])
            self._finish(host)
        self._assign()

    def _finish(self, host: int) -> None:
        """Goes on to the next shard of each task whose shard is written, and ends tasks without another."""
        for task in [task for task in self._running[host] if task.left == 0]:
            self.outcome.written[task.sizes.popleft()] += 1
            self.outcome.ended[host] = self._now
            if task.sizes:
                task.left = task.sizes[0]
            else:
                self._running[host].remove(task)

    def _die(self) -> None:
        assert self._cluster.dies
        self._dead = host = self._cluster.dies[0]
        self.outcome.lost = sum(task.sizes[0] - task.left for task in self._running[host])
        self._orphans = [*(tuple(task.sizes) for task in self._running[host]), *self._own[host]]
        self._running[host], self._own[host] = [], deque()

    def _hand_over(self) -> None:
        self._shared.extendleft(reversed(self._orphans))


def _rest(left: float, done: float) -> float:
    """What is left; nothing, where less than a millionth of a step is."""
    return left - done if left - done > 1e-6 * done else 0.0
