"""Inputs of a replan: the profile (the file next to the plan, or the costs in the plan) and the cluster.

The cluster is the rest after a loss, or a larger one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.planner.layouts.space import MAX_DEVICES
from mindspeed_autoparallel.planner.replay import planned_costs
from mindspeed_autoparallel.planner.results import PROFILE_FILE
from mindspeed_autoparallel.profiles import Profile, read_profile
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


def costs_of(plan: Plan, plan_file: Path, given: Path | None = None) -> tuple[Profile, str]:
    """Return the profile to plan with, and a note if the search is narrower than that of ``plan``.

    ``given``: the user's own choice. Otherwise ``plan.profile.json`` next to the plan, if its hash is the plan's; else
    the costs in the plan, which cover its own TP, CP, EP and micro batch size. Raises ``ProfileError`` for a profile of
    another model and ``PlanError`` for a plan without costs.
    """
    if given is not None:
        profile = read_profile(given)
        _check_model(plan, profile, given)
        return profile, ""
    beside = plan_file.with_name(PROFILE_FILE)
    if beside.is_file():
        profile = read_profile(beside)
        if profile.sha256() == plan.profile.sha256:
            return profile, ""
    profile = planned_costs(plan)
    (measured,) = (measurement.at.label() for measurement in profile.measurements[:1])
    return profile, (
        f"only {measured} is searched, with every PP, DP and VPP: {PROFILE_FILE} of this plan is not beside it. Give "
        "the profile with --profile to search all sizes."
    )


def _check_model(plan: Plan, profile: Profile, path: Path) -> None:
    planned = {module.name: module.num_layers for module in plan.model.modules}
    found = {module.name: module.num_layers for module in profile.model.modules}
    hashes = {plan.profile.model_hash, profile.provenance.model_hash} - {""}
    if planned != found or len(hashes) > 1:
        raise ProfileError(f"--profile {path} is of another model: layers {found}, the plan's {planned}.")
