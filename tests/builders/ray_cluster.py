"""A Ray cluster on this machine: a head without processors, and nodes that can be killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MEMORY = 80 << 20
"""Bytes of a node's object store."""


class RayCluster:
    """The nodes; tasks use the network resource, one at a time on each node.

    Attributes:
        address: for `RAY_ADDRESS`.
    """

    def __init__(self, cluster: Any, count: int) -> None:
        self._cluster = cluster
        resources = {"llmconv_nic": 1}
        self._nodes = [
            cluster.add_node(num_cpus=1, resources=resources, object_store_memory=MEMORY) for _ in range(count)
        ]
        self.address = str(cluster.address)

    def kill_node(self) -> None:
        """Kills all processes of a node."""
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)


@contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    """A cluster of a head and `nodes` nodes, whose processes have this process's environment."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - takes a second to load

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield RayCluster(cluster, nodes)
    finally:
        cluster.shutdown()
