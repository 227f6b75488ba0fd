"""405 B on 16 hosts with a bucket, simulated over the shards of the real plan: seconds, stragglers, requests, price.

No cloud is used. Rates of networks and stores are assumptions; plan, shards, processor time and memory are measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.cluster import Cluster, Outcome, Simulation, Sizes
from benchmarks.measure import Target, report
from benchmarks.scale_out import shards_of
from llmconv.files.mirror import AHEAD, CHUNK, LIMIT, REQUESTS_AT_ONCE
from llmconv.output.plan import Shard
from llmconv.output.work import Part
from llmconv.stores.object_store import PARTS_AT_ONCE, SMALL_AT_ONCE, part_bytes

HOSTS, FILES = 16, 127
"""Hosts, and files of the source, whose headers every plan reads."""

NICS = {"1 GB/s": 1e9, "25 Gbit/s": 25e9 / 8}
STREAM = 90e6
"""Bytes per second of one connection."""

CPU, CORES = 1.5, 2
"""Processor seconds per GB of `to-hf` (docs/benchmarks.md), and how many threads of a task use one at once."""

LATENCY, REQUESTS = 0.03, 7
"""Seconds of a small request, and how many come one after another before and after a shard: claim, journal, sizes."""

PLAN, NOTICED = 1.2, 30
"""Seconds of a process that starts and plans; until a scheduler knows that a host is dead."""

PROCESS = 235e6
"""Peak bytes of `to-hf` of a checkpoint of 30 GB (docs/benchmarks.md); uploads and downloads come on top."""

GET, PUT = 0.0004 / 1000, 0.005 / 1000
"""Dollars per request, list price of S3 in us-east-1."""


@dataclass(frozen=True)
class Way:
    """How the shards come to the hosts.

    Attributes:
        size: `--max-shard-size`.
        slots: tasks of a host at once.
        queue: a task per shard, which any host takes; else parts, as many as slots.
    """

    size: str
    slots: int
    queue: bool

    def __str__(self) -> str:
        if self.queue:
            return f"`--engine ray`, {self.slots} per host, {self.size}"
        return f"`--part i/{HOSTS * self.slots}`, {self.slots} per host, {self.size}"

    def simulated(self, nic: float, shards: Sequence[Shard], **events: Any) -> Outcome:
        """Seconds until the last shard is there; `events` are fields of `Cluster`."""
        cluster = replace(
            Cluster(nic, TASK_RATE, self.slots, START, REQUESTS * LATENCY, HOSTS, noticed=NOTICED), **events
        )
        sizes = sorted((shard.nbytes for shard in shards), reverse=True)
        if self.queue:
            return Simulation(cluster, [], [(size,) for size in sizes]).run()
        return Simulation(cluster, self._parts(shards), []).run()

    def _parts(self, shards: Sequence[Shard]) -> list[list[Sizes]]:
        """The parts of each host; a scheduler deals them out in order."""
        count, sizes = HOSTS * self.slots, {shard.name: shard.nbytes for shard in shards}
        parts = [Part(number, count).chosen(shards) for number in range(count)]
        dealt = [tuple(sizes[shard.name] for shard in shards if shard.name in part) for part in parts]
        return [[part for part in dealt[host::HOSTS] if part] for host in range(HOSTS)]


TASK_RATE = min(min(REQUESTS_AT_ONCE, PARTS_AT_ONCE) * STREAM, CORES / CPU * 1e9)
"""Bytes per second of a task alone: its uploads limit it."""

START = PLAN + FILES / REQUESTS_AT_ONCE * LATENCY
"""Seconds until a task of a new process writes."""


def ways(nic: float) -> list[Way]:
    """Those to compare: one task per host, and as many as fill the network."""
    enough = -(-int(nic) // int(TASK_RATE))
    parts = [Way("5GB", 1, queue=False), *(Way(size, enough, queue=False) for size in ("5GB", "2GB"))]
    return [*parts, *(Way(size, enough, queue=True) for size in ("5GB", "2GB"))]


def finish_seconds(shards: Sequence[Shard]) -> float:
    """Seconds of `--finish`: a plan, the journal entry of every shard read and deleted, and a few small files."""
    return START + LATENCY * (2 * len(shards) / SMALL_AT_ONCE + 2 * REQUESTS)


def row(name: str, way: Way) -> tuple[str, float]:
    """A Markdown row, and the efficiency without accidents."""
    nic, shards = NICS[name], shards_of(way.size)
    total, end = sum(shard.nbytes for shard in shards), finish_seconds(shards)
    even = way.simulated(nic, shards)
    slow = way.simulated(nic, shards, speeds={3: 0.5})
    dead = way.simulated(nic, shards, dies=(3, even.seconds / 2))
    ideal = total / (HOSTS * nic)
    text = f"| {way} | {name} | {even.seconds + end:.0f} | {ideal:.0f} | {ideal / (even.seconds + end):.0%} "
    text += f"| {abs(even.waiting()):.1f} | {slow.seconds + end:.0f} ({slow.waiting():.1f}) "
    return f"{text}| {dead.seconds + end:.0f} ({dead.lost / 1e9:.1f}) |", ideal / (even.seconds + end)


def costs(way: Way) -> str:
    """A Markdown row of requests, price, temporary disk and memory of a host."""
    shards = shards_of(way.size)
    plans = HOSTS * way.slots + 1
    gets = sum(-(-shard.nbytes // CHUNK) for shard in shards) + plans * FILES + len(shards) * (AHEAD + 1)
    puts = sum(-(-shard.nbytes // part_bytes(shard.nbytes)) + 3 for shard in shards)
    disk = way.slots * (LIMIT + FILES * 2 * CHUNK)
    buffers = (PARTS_AT_ONCE + 1) * part_bytes(max(shard.nbytes for shard in shards)) + REQUESTS_AT_ONCE * CHUNK
    price = f"{gets:,} | {puts:,} | {gets * GET:.2f} + {puts * PUT:.2f}"
    return f"| {way} | {len(shards)} | {price} | {disk / 1e9:.0f} | {way.slots * (PROCESS + buffers) / 1e9:.1f} |"


def main() -> int:
    """Simulates, prints the tables, and returns 1 if a target is missed."""
    rows = {(name, way): row(name, way) for name in NICS for way in ways(NICS[name])}
    best = {name: max(found for (other, _), (_, found) in rows.items() if other == name) for name in NICS}
    alone = max(found for (_, way), (_, found) in rows.items() if way.slots == 1)
    least = dict(zip(NICS, (0.8, 0.5), strict=True))
    targets = [Target(f"best efficiency at {name}", best[name], least[name], at_least=True) for name in NICS]
    lines = [
        f"Simulated, not run: {HOSTS} equal hosts. A task is limited by its {PARTS_AT_ONCE} uploads of "
        f"{STREAM / 1e6:.0f} MB/s ({TASK_RATE / 1e6:.0f} MB/s),",
        f"and by the network of its host, full duplex. A process starts and plans in {START:.1f} s; a dead host is",
        f"noticed after {NOTICED} s. The ideal is all bytes at the speed of all networks. Seconds include the finish.",
        "In parentheses: seconds that the mean host has nothing to do, and the GB that a dead host had moved in vain.",
        "",
        "| way | network | seconds | ideal | efficiency | stragglers, s | a host at half speed | one dies half-way |",
        "|" + " --- |" * 8,
        *(text for text, _ in rows.values()),
        "",
        "| way | shards | GETs | PUTs | GETs + PUTs, $ | temporary disk per host, GB | memory per host, GB |",
        "|" + " --- |" * 7,
        *(costs(way) for way in dict.fromkeys(way for _, way in rows)),
        "",
        f"One task per host reaches {alone:.0%} of the ideal at most. The price is that of the requests alone.",
    ]
    return report("cluster_simulation", "405 B on 16 hosts, simulated", "\n".join(lines), targets)


if __name__ == "__main__":
    sys.exit(main())
