"""A cluster of Ray on this machine: a head, and nodes that come and go."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

CPUS = 2  # of each node


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Ray's own cluster for tests, with one node."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    head = {"num_cpus": CPUS, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def another_node(
    cluster: Any, resources: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Any]:
    """One more node, which leaves at the end if it was not lost.  resources: of its own kinds."""
    node = cluster.add_node(num_cpus=CPUS, resources=dict(resources))
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node)
