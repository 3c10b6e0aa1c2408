"""The cluster that remains after a loss, or that has grown."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.layouts.space import MAX_DEVICES
from mindspeed_autoparallel.spec import Cluster, Plan


def cluster_after_loss(plan: Plan, lost_nodes: Collection[int]) -> Cluster:
    """Return the plan's cluster without ``lost_nodes`` (numbers from 0). Raises ``ConfigError`` for unknown nodes."""
    cluster = plan.cluster
    unknown = sorted(node for node in set(lost_nodes) if not 0 <= node < cluster.num_nodes)
    if unknown:
        known = "node 0 alone" if cluster.num_nodes == 1 else f"nodes 0 to {cluster.num_nodes - 1}"
        raise ConfigError(f"--lost-node {unknown[0]}: the plan is for {known}.")
    left = cluster.num_nodes - len(set(lost_nodes))
    if not left:
        raise ConfigError(f"all {cluster.num_nodes} nodes of the plan are lost: there is nothing to plan for.")
    return replace(cluster, num_nodes=left)


def cluster_of_nodes(plan: Plan, num_nodes: int, devices_per_node: int | None = None) -> Cluster:
    """Return a cluster of ``num_nodes`` nodes like the plan's. Raises ``ConfigError`` for sizes below 1."""
    devices = plan.cluster.devices_per_node if devices_per_node is None else devices_per_node
    for flag, value in (("--nnodes", num_nodes), ("--nproc-per-node", devices)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}.")
    if num_nodes * devices > MAX_DEVICES:
        raise ConfigError(f"--nnodes {num_nodes} x {devices} devices are more than {MAX_DEVICES}.")
    return replace(plan.cluster, num_nodes=num_nodes, devices_per_node=devices)
