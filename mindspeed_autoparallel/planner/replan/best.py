"""The fastest plan for all nodes of a cluster or fewer: the most promising number of nodes is searched first."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace
from math import inf

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.interrupts import Stopped
from mindspeed_autoparallel.planner.best_first import Progress, labelled, silent
from mindspeed_autoparallel.planner.candidate import Candidate, Splits
from mindspeed_autoparallel.planner.hetero.compare import HeteroOptions
from mindspeed_autoparallel.planner.layouts.bounds import step_bound_us
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.layouts.turns import promise_us
from mindspeed_autoparallel.planner.runnable import Runs, runnable
from mindspeed_autoparallel.planner.wanted import Wanted, find_plan
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Plan

_NEAR = ("tensor_size", "context_size", "expert_size", "expert_tensor_size", "micro_batch_size", "virtual_size")
"""Sizes of the layouts that are searched first."""
_ANY_HOST = SpaceOptions()
NEAR_SHARE = 0.3
"""Largest share of the time for these."""
_NODES_SHARE, _PROMISE_SHARE = 0.5, 0.25
"""Share of the time left for the next number of nodes if others may follow; share of the time for their estimates."""
LEAST_S = 1.0
"""Seconds below which no search begins once a plan is known."""


def best_plan(
    old: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    time_limit_s: float = 30.0,
    progress: Progress = silent,
    splits: Splits | None = None,
    host: SpaceOptions = _ANY_HOST,
    runs: Runs | None = None,
) -> Plan:
    """Return the fastest plan for all nodes of ``cluster`` or fewer; ``splits`` and ``host``: what the host can run.

    Fewer nodes may be faster if no good layout has as many ranks as there are devices. A number of nodes is searched
    unless a known plan is already faster than the bound of ``old`` per device would allow there, or ``time_limit_s``,
    that of all numbers together, is over; the most promising number comes first. Raises ``InfeasiblePlan`` (or
    ``ConfigError``: no legal layout) if no number fits, and ``Stopped`` with the best plan so far at an interrupt.
    """
    own = {name: getattr(host, name) for name in ("group_sizes", "least_expert_sizes", "ramp")}
    space = replace(_space_of(old), **own)
    numbers = _Numbers(old, profile, cluster, space, time.monotonic() + _PROMISE_SHARE * time_limit_s)
    until, best = time.monotonic() + time_limit_s, None
    errors: dict[int, InfeasiblePlan | ConfigError] = {}
    try:
        while (nodes := numbers.pop(inf if best is None else best.mean_us)) is not None:
            left_s = until - time.monotonic()
            if best is not None and left_s < LEAST_S:
                progress(f"the time limit ended before a plan for {nodes} nodes was searched")
                break
            seconds = max(LEAST_S, left_s * (_NODES_SHARE if numbers.has_more else 1.0))
            options = SearchOptions(time_limit_s=seconds, space=space, with_relaxations=False)
            own_progress = labelled(progress, f"{nodes} nodes: ")
            try:
                plan = _search(old, profile, replace(cluster, num_nodes=nodes), options, splits, own_progress, runs)
            except (InfeasiblePlan, ConfigError) as error:
                errors[nodes] = error
                continue
            best = plan if best is None else _faster(best, plan)
    except KeyboardInterrupt as interrupt:
        known = [each for each in (best, interrupt.plan if isinstance(interrupt, Stopped) else None) if each]
        if not known:
            raise
        raise Stopped(_faster(*known) if len(known) > 1 else known[0], interrupt) from interrupt
    if best is None:
        raise errors[max(errors)]
    return best


def _faster(first: Plan, second: Plan) -> Plan:
    """Return the faster plan, of equally fast ones that for more nodes."""
    return min(first, second, key=lambda plan: (plan.mean_us, -plan.cluster.num_nodes))


class _Numbers:
    """The numbers of nodes that may have the best plan, in the order of the estimates of their best layouts."""

    def __init__(self, old: Plan, profile: Profile, cluster: Cluster, space: SpaceOptions, until: float) -> None:
        self._old, self._profile, self._cluster, self._space, self._until = old, profile, cluster, space, until
        self._work_us = old.search.lower_bound_us * old.cluster.num_devices
        self._queue: list[tuple[float, int]] = []
        self._listed: dict[int, list[Candidate]] = {}
        self._next = cluster.num_nodes

    @property
    def has_more(self) -> bool:
        """Return whether other numbers may be searched."""
        return bool(self._queue) or self._next > 0

    def pop(self, best_us: float) -> int | None:
        """Return the most promising number that is left and may have a plan faster than ``best_us``."""
        while True:
            # A number is estimated once the bound per device allows it to be the first of the queue.
            while self._next and self._ideal_us(self._next) < min(best_us, *[each[0] for each in self._queue[:1]], inf):
                heapq.heappush(self._queue, (self._promise_us(self._next), -self._next))
                self._next -= 1
            if not self._queue:
                return None
            nodes = -heapq.heappop(self._queue)[1]
            if max(self._ideal_us(nodes), self._bound_us(nodes, best_us)) < best_us:
                return nodes

    def _ideal_us(self, nodes: int) -> float:
        """Return the bound of the old plan per device."""
        return self._work_us / (nodes * self._cluster.devices_per_node)

    def _candidates(self, nodes: int) -> list[Candidate]:
        """Return the layouts of a number of nodes; none if the search of it reports an error."""
        if nodes not in self._listed:
            cluster = replace(self._cluster, num_nodes=nodes)
            try:
                found, _ = enumerate_layouts(self._profile, cluster, self._old.global_batch_size, self._space)
            except ConfigError:
                found = []
            self._listed[nodes] = found
        return self._listed[nodes]

    def _promise_us(self, nodes: int) -> float:
        if self._old.hetero is not None:
            return self._ideal_us(nodes)  # the profile's layouts are not those that are searched
        if time.monotonic() > self._until:
            return inf
        return min(map(promise_us, self._candidates(nodes)), default=inf)

    def _bound_us(self, nodes: int, best_us: float) -> float:
        """Return a bound of all layouts; 0 if none is needed."""
        if self._old.hetero is not None or best_us == inf:
            return 0.0
        return min(map(step_bound_us, self._candidates(nodes)), default=0.0)


def _search(
    old: Plan,
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions,
    splits: Splits | None,
    progress: Progress,
    runs: Runs | None,
) -> Plan:
    batch = old.global_batch_size
    if old.hetero is not None or splits is not None:
        hetero = None
        if old.hetero is not None:
            stages = any(phase.stage_layers for phase in old.hetero.encoders)
            hetero = HeteroOptions(balance=old.hetero.balance, encoder_pipelines=stages)
        wanted = Wanted(
            cluster=cluster, global_batch_size=batch, options=options, splits=splits, hetero=hetero, runs=runs
        )
        found = find_plan(profile, wanted, progress)
        return found if isinstance(found, Plan) else found.best
    started = time.monotonic()

    def searched(one: Profile) -> Plan:
        near = _near(old, one, cluster, options)
        left_s = max(options.time_limit_s / 2, options.time_limit_s - (time.monotonic() - started))
        return search(one, cluster, batch, replace(options, known=near, time_limit_s=left_s), progress=progress)

    return runnable(searched, profile, runs, progress)


def _near(old: Plan, profile: Profile, cluster: Cluster, options: SearchOptions) -> Plan | None:
    """Return a plan with the old one's sizes except PP and DP, found quickly and good enough to discard most others;
    ``None`` if there is none.
    """
    held = {name: getattr(old.layout, name) for name in _NEAR}
    few = replace(options, space=replace(options.space, held=held), time_limit_s=NEAR_SHARE * options.time_limit_s)
    try:
        return search(profile, cluster, old.global_batch_size, few)
    except (InfeasiblePlan, ConfigError):
        return None


def _space_of(old: Plan) -> SpaceOptions:
    """Return the search options that follow from the old plan's layout."""
    layout = old.layout
    return SpaceOptions(
        standalone_ends=layout.standalone_ends,
        schedules=("1f1b", "gpipe") if layout.schedule == "gpipe" else ("1f1b",),
        distributed_optimizer=layout.distributed_optimizer,
        overlap_gradient_reduce=layout.overlap_gradient_reduce,
        overlap_tensor_parallel=layout.overlap_tensor_parallel,
        paired=layout.paired,
    )
