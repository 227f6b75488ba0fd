"""The simulation of a cluster: what must hold of any hosts and shards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cluster import Cluster, Outcome, Simulation, Sizes

CLUSTER = Cluster(nic=10, task_rate=4, slots=3, start=2, again=1, hosts=4)
SHARDS = st.lists(st.integers(1, 100), min_size=1, max_size=40).map(tuple)
CLUSTERS = st.builds(
    Cluster,
    nic=st.integers(1, 30),
    task_rate=st.integers(1, 30),
    slots=st.integers(1, 4),
    start=st.floats(0, 5),
    again=st.floats(0, 5),
    hosts=st.integers(2, 5),
    speeds=st.dictionaries(st.integers(0, 4), st.sampled_from((0.5, 0.25)), max_size=2),
    dies=st.none() | st.tuples(st.integers(0, 1), st.floats(0, 30)),
    noticed=st.floats(0, 5),
)


def queued(cluster: Cluster, shards: Sizes) -> Outcome:
    return Simulation(cluster, [], [(size,) for size in shards]).run()


def in_parts(cluster: Cluster, shards: Sizes) -> Outcome:
    parts = [shards[host :: cluster.hosts] for host in range(cluster.hosts)]
    return Simulation(cluster, [[part] if part else [] for part in parts], []).run()


@pytest.mark.slow
@given(cluster=CLUSTERS, shards=SHARDS)
def test_every_shard_is_written_once_and_no_network_is_exceeded(cluster: Cluster, shards: Sizes) -> None:
    for outcome in (queued(cluster, shards), in_parts(cluster, shards)):
        assert outcome.written == Counter(shards)
        assert outcome.seconds >= sum(shards) / (cluster.hosts * cluster.nic) * (1 - 1e-6)
        assert outcome.seconds >= max(shards) / cluster.task_rate * (1 - 1e-6)
        assert outcome.waiting() >= -1e-6


def test_the_seconds_are_those_of_paper() -> None:
    one = replace(CLUSTER, hosts=1)
    assert queued(one, (8,)).seconds == pytest.approx(2 + 8 / 4)
    assert queued(one, (10, 10, 10)).seconds == pytest.approx(2 + 30 / 10)
    assert queued(replace(one, slots=1), (8, 8)).seconds == pytest.approx(2 + 2 + 1 + 2)
    assert in_parts(replace(one, slots=1), (8, 8)).seconds == pytest.approx(2 + 2 + 2)


def test_a_queue_gives_a_slow_host_less() -> None:
    slow, shards = replace(CLUSTER, speeds={1: 0.5}), (20,) * 60
    assert queued(slow, shards).seconds < 0.75 * in_parts(slow, shards).seconds


def test_a_dead_host_costs_only_the_shards_that_it_was_writing() -> None:
    dead = replace(CLUSTER, dies=(1, 20))
    outcome = queued(dead, (20,) * 60)
    assert 0 < outcome.lost < CLUSTER.slots * 20
    assert outcome.written == Counter({20: 60})
    left = (60 * 20 + outcome.lost - CLUSTER.hosts * 20 * CLUSTER.nic) / (3 * CLUSTER.nic)
    assert outcome.seconds >= 20 + left
    assert outcome.seconds < in_parts(dead, (20,) * 60).seconds
