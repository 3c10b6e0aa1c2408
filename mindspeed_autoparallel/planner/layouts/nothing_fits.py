"""Explain a search without a plan: layouts whose states do not fit, the nearest layout, and the memory that
would fit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.candidate import Candidate, limit_of
from mindspeed_autoparallel.planner.layouts.bounds import least_static_bytes
from mindspeed_autoparallel.planner.layouts.layout_solver import simple_splits
from mindspeed_autoparallel.planner.layouts.shortage import nearest_plan
from mindspeed_autoparallel.planner.layouts.space import MAX_DEVICES, SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.layouts.tasks import Request
from mindspeed_autoparallel.planner.layouts.turns import promise_us
from mindspeed_autoparallel.spec.plan_records import Verdict
from mindspeed_autoparallel.units import format_bytes

NEAREST_S, CLUSTER_S = 12.0, 10.0
"""Seconds of the search for the nearest layout; processor seconds of the search for a cluster that is large enough."""
_TRIED = 6
"""Number of a cluster's layouts whose simple splits are tried, the most promising first."""


def too_full(candidates: Iterable[Candidate]) -> tuple[list[Candidate], list[Candidate], list[Verdict]]:
    """Return the layouts whose states may fit, those whose states never fit, and verdicts on the latter."""
    left, full, verdicts = [], [], []
    for item in candidates:
        least = least_static_bytes(item) if _is_additive(item) else 0
        if least <= item.limit_bytes:
            left.append(item)
            continue
        reason = (
            f"parameters, gradients and optimizer alone take {format_bytes(least)} on some rank, whatever the split."
        )
        full.append(item)
        verdicts.append(Verdict(layout=item.layout, outcome="memory", reason=reason))
    return left, full, verdicts


def _is_additive(candidate: Candidate) -> bool:
    return candidate.profile.memory_semantics != "mindspeed" and candidate.layout.sharding is None


@dataclass(frozen=True, kw_only=True)
class NothingFits:
    """A search that found no plan: its request, and its final candidates and verdicts."""

    request: Request
    space: SpaceOptions
    without_plan: Sequence[Candidate]
    verdicts: Sequence[Verdict]

    def error(self) -> InfeasiblePlan:
        """Return the error with the nearest layout, a limit and a cluster that suffice, and other remedies."""
        limit = limit_of(self.request.profile.device, self.request.cluster)
        if not self.without_plan:
            return InfeasiblePlan("no plan was found in time, and none was proved impossible. Raise the time limit.")
        deadline = time.monotonic() + NEAREST_S
        nearest = nearest_plan(self.without_plan, deadline)
        if nearest is None:
            return InfeasiblePlan(f"no plan fits in {format_bytes(limit)} per device.")
        unsure = sum(verdict.outcome == "unsolved" for verdict in self.verdicts)
        maybe = f" {unsure} layout{'s were' if unsure > 1 else ' was'} not settled in time." if unsure else ""
        for encoder, reader in self.request.profile.model.deepstacks():
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
        deadline, cluster = time.process_time() + CLUSTER_S, self.request.cluster
        times = 2
        while cluster.num_devices * times <= MAX_DEVICES and time.process_time() < deadline:
            found = self._fits_in(times * cluster.num_nodes, deadline)
            if found is None:
                times *= 2
                continue
            fewer = 3 * times * cluster.num_nodes // 4
            again = self._fits_in(fewer, deadline) if times > 2 else None
            nodes, label = (fewer, again) if again is not None else (times * cluster.num_nodes, found)
            return (
                f" The memory of {nodes} nodes ({nodes * cluster.devices_per_node} devices) is enough, with "
                f"{label}; no simple split was found for the smaller clusters tried."
            )
        return (
            f" On up to {times // 2} times the nodes no simple split was found either: a smaller micro batch, a "
            "shorter sequence or devices with more memory would help."
        )

    def _fits_in(self, num_nodes: int, deadline: float) -> str | None:
        """Return the layout of a simple split that fits on ``num_nodes`` nodes, if one of the most promising does."""
        request, space = self.request, replace(self.space, virtual_sizes=(1,))
        cluster = replace(request.cluster, num_nodes=num_nodes)
        try:
            candidates, _ = enumerate_layouts(request.profile, cluster, request.global_batch_size, space)
        except ConfigError:
            return None
        left, _, _ = too_full(candidates)
        promised = sorted((promise_us(item), order) for order, item in enumerate(left))
        for us, order in promised[:_TRIED]:
            if us == inf or time.process_time() > deadline:
                return None
            if any(split.fits for split in simple_splits(left[order]).values()):
                return left[order].layout.label()
        return None
