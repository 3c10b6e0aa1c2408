"""Explain a search without a plan: layouts whose states do not fit, the nearest layout, and the memory that
would fit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.bounds import least_static_bytes
from mindspeed_autoparallel.planner.layouts.layout_solver import simple_splits
from mindspeed_autoparallel.planner.layouts.shortage import nearest_plan
from mindspeed_autoparallel.planner.layouts.space import MAX_DEVICES, SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.layouts.turns import promise_us
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.spec.plan import Verdict
from mindspeed_autoparallel.units import format_bytes

NEAREST_S, CLUSTER_S = 12.0, 10.0
"""Seconds of the search for the nearest layout; processor seconds of the search for a cluster that is large enough."""
_TRIED = 6
"""Number of a cluster's layouts whose simple splits are tried, the most promising first."""


def too_full(
    profile: Profile, cluster: Cluster, candidates: Iterable[Candidate]
) -> tuple[list[Candidate], list[Candidate], list[Verdict]]:
    """Return the layouts whose states may fit, those whose states never fit, and verdicts on the latter."""
    limit = cluster.memory_limit_bytes or profile.device.memory_capacity_bytes
    left, full, verdicts = [], [], []
    for item in candidates:
        least = least_static_bytes(profile, item) if _is_additive(profile, item) else 0
        if least <= limit:
            left.append(item)
            continue
        reason = (
            f"parameters, gradients and optimizer alone take {format_bytes(least)} on some rank, whatever the split."
        )
        full.append(item)
        verdicts.append(Verdict(layout=item.layout, outcome="memory", reason=reason))
    return left, full, verdicts


def _is_additive(profile: Profile, candidate: Candidate) -> bool:
    return profile.memory_semantics != "mindspeed" and candidate.layout.sharding is None


@dataclass(frozen=True, kw_only=True)
class NothingFits:
    """A search that found no plan: its request, and its final candidates and verdicts."""

    profile: Profile
    cluster: Cluster
    global_batch_size: int
    space: SpaceOptions
    without_plan: Sequence[Candidate]
    verdicts: Sequence[Verdict]

    def error(self) -> InfeasiblePlan:
        """Return the error with the nearest layout, a limit and a cluster that suffice, and other remedies."""
        profile, cluster = self.profile, self.cluster
        limit = cluster.memory_limit_bytes or profile.device.memory_capacity_bytes
        if not self.without_plan:
            return InfeasiblePlan("no plan was found in time, and none was proved impossible. Raise the time limit.")
        deadline = time.monotonic() + NEAREST_S
        nearest = nearest_plan(profile, cluster, self.without_plan, self.global_batch_size, deadline)
        if nearest is None:
            return InfeasiblePlan(f"no plan fits in {format_bytes(limit)} per device.")
        unsure = sum(verdict.outcome == "unsolved" for verdict in self.verdicts)
        maybe = f" {unsure} layout{'s were' if unsure > 1 else ' was'} not settled in time." if unsure else ""
        for encoder, reader in profile.model.deepstacks():
            maybe += (
                f" One stage holds the end of {encoder.name} and the first {encoder.deepstack_layers} layers of "
                f"{reader.name} (deepstack)."
            )
        return InfeasiblePlan(
            f"no plan {'was found in time that ' if unsure else ''}fits in {format_bytes(limit)} per device. "
            f"{nearest.text(limit)}.{self._larger_cluster()}{maybe}"
        )

    def _larger_cluster(self) -> str:
        """Return a sentence about the smallest cluster in which a simple split fits.

        The number of nodes is doubled until a split fits; then three quarters of that number are tried.
        """
        deadline = time.process_time() + CLUSTER_S
        times = 2
        while self.cluster.num_devices * times <= MAX_DEVICES and time.process_time() < deadline:
            found = self._fits_in(times * self.cluster.num_nodes, deadline)
            if found is None:
                times *= 2
                continue
            fewer = 3 * times * self.cluster.num_nodes // 4
            again = self._fits_in(fewer, deadline) if times > 2 else None
            nodes, label = (fewer, again) if again is not None else (times * self.cluster.num_nodes, found)
            return (
                f" The memory of {nodes} nodes ({nodes * self.cluster.devices_per_node} devices) is enough, with "
                f"{label}; no simple split was found for the smaller clusters tried."
            )
        return (
            f" On up to {times // 2} times the nodes no simple split was found either: a smaller micro batch, a "
            "shorter sequence or devices with more memory would help."
        )

    def _fits_in(self, num_nodes: int, deadline: float) -> str | None:
        """Return the layout of a simple split that fits on ``num_nodes`` nodes, if one of the most promising does."""
        cluster, space = replace(self.cluster, num_nodes=num_nodes), replace(self.space, virtual_sizes=(1,))
        try:
            candidates, _ = enumerate_layouts(self.profile, cluster, self.global_batch_size, space)
        except ConfigError:
            return None
        left, _, _ = too_full(self.profile, cluster, candidates)
        promised = [(promise_us(self.profile, cluster, item), order) for order, item in enumerate(left)]
        for us, order in sorted(promised)[:_TRIED]:
            if us == inf or time.process_time() > deadline:
                return None
            splits = simple_splits(self.profile, cluster, left[order], self.global_batch_size)
            if any(split.evaluation.fits for split in splits):
                return left[order].layout.label()
        return None
