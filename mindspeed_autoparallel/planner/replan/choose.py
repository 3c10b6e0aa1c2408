"""The plan to continue with: the one that trains most samples in the expected time, including its move."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.interrupts import Stopped
from mindspeed_autoparallel.planner.best_first import Progress, silent
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.replan.best import LEAST_S, best_plan
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan
from mindspeed_autoparallel.units import GIB

_KEPT = ("pipeline_size", "tensor_size", "context_size", "expert_size", "expert_tensor_size", "virtual_size")
"""Sizes that stay the same if training continues with fewer or more replicas."""

_SAME_SHAPE_SHARE = 1 / 6
"""Share of the limit that is kept for the old plan's shape."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """How long the new cluster is expected to last, and how checkpoints are stored."""

    hours: float = 24.0
    files_are_cut: bool = False
    """Whether checkpoints fit one layout only, so that ``convert resplit`` must recut them for another."""

    def __post_init__(self) -> None:
        if not 0 < self.hours < float("inf"):
            raise ConfigError(f"--remaining-hours must be above 0, got {self.hours:g}.")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One plan to continue with."""

    name: str
    """``best``, ``same shape`` (PP, TP, CP, EP and VPP of the old plan, other replicas) or ``stay``."""
    plan: Plan
    move: Move
    steps: float
    """Number of steps in the expected time after the move."""


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """The choices after the loss, best first; the first is recommended."""

    options: tuple[Option, ...]
    cluster: Cluster
    """The new cluster; a plan may leave nodes of it unused."""

    @property
    def chosen(self) -> Option:
        """Return the recommended option."""
        return self.options[0]


def replan(
    old: Plan,
    profile: Profile,
    cluster: Cluster,
    rates: MoveRates,
    window: Window,
    *,
    time_limit_s: float = 30.0,
    progress: Progress = silent,
) -> Replanned:
    """Return the options to continue on ``cluster`` instead of the cluster of ``old``, at the same global batch.

    ``time_limit_s``: that of all searches together. Raises ``InfeasiblePlan`` if no plan fits on any number of nodes of
    ``cluster``, and ``Stopped`` with the ``Replanned`` so far at an interrupt once a plan is known.
    """
    until, interrupt = time.monotonic() + time_limit_s, None
    ways: list[tuple[str, Plan]] = []
    try:
        best_s = time_limit_s * (1 - _SAME_SHAPE_SHARE * (old.hetero is None))
        ways.append(("best", best_plan(old, profile, cluster, time_limit_s=best_s, progress=progress)))
        if old.hetero is None and ways[0][1].layout != old.layout:
            ways += [("same shape", plan) for plan in _same_shape(old, profile, cluster, until)]
    except KeyboardInterrupt as error:
        if isinstance(error, Stopped) and not ways:
            ways.append(("best", error.plan))
        if not ways:
            raise
        interrupt = error
    options = [
        _option(name, plan, move_to(plan, profile, rates, recut=_recut(window, old, plan)), window)
        for name, plan in ways
    ]
    if cluster.num_devices >= old.cluster.num_devices and cluster.num_nodes >= old.cluster.num_nodes:
        options.append(_option("stay", old, STAYING, window))
    options.sort(key=lambda option: -option.steps)
    found = Replanned(options=tuple(options), cluster=cluster)
    if interrupt is not None:
        raise Stopped(found, interrupt)
    return found


def _same_shape(old: Plan, profile: Profile, cluster: Cluster, until: float) -> Iterator[Plan]:
    """Yield the old plan's shape with as many replicas as fit ``cluster``, if any does; shards stay the same."""
    each = old.layout.num_devices // old.layout.data_size
    for replicas in range(cluster.num_devices // each, 0, -1):
        if replicas * each % cluster.devices_per_node:
            continue
        nodes = replicas * each // cluster.devices_per_node
        layout: Layout = replace(old.layout, data_size=replicas)
        left_s = max(LEAST_S, until - time.monotonic())
        options = SearchOptions(time_limit_s=left_s, layouts=[layout], with_relaxations=False)
        try:
            yield search(profile, replace(cluster, num_nodes=nodes), old.global_batch_size, options)
            return
        except (InfeasiblePlan, ConfigError):
            continue


def _recut(window: Window, old: Plan, plan: Plan) -> bool:
    same = all(getattr(old.layout, name) == getattr(plan.layout, name) for name in _KEPT)
    return window.files_are_cut and not (same and [s.layers for s in old.stages] == [s.layers for s in plan.stages])


def _option(name: str, plan: Plan, move: Move, window: Window) -> Option:
    left_s = max(0.0, window.hours * 3600 - move.seconds)
    return Option(name=name, plan=plan, move=move, steps=left_s / (plan.mean_us / 1e6))


_STATE = ("parameters", "optimizer")
"""Terms of a rank's memory that a checkpoint holds; gradients are not stored."""


@dataclass(frozen=True, kw_only=True)
class MoveRates:
    """Assumptions about the machines, stated by the user."""

    storage_bytes_per_s: float = 2.0 * GIB
    """Read rate of one node for checkpoints; all nodes read at once."""
    restart_s: float = 60.0
    """Processes, imports, communicators and the first step."""

    def __post_init__(self) -> None:
        if not 0 < self.storage_bytes_per_s < float("inf"):
            raise ConfigError(f"--storage-gib-per-s must be above 0, got {self.storage_bytes_per_s / GIB:g}.")
        if not 0 <= self.restart_s < float("inf"):
            raise ConfigError(f"--restart-s must be at least 0, got {self.restart_s:g}.")


@dataclass(frozen=True, kw_only=True)
class Move:
    """The move to a plan."""

    read_bytes: int
    """From storage: every value of weights and optimizer state once."""
    sent_bytes: int
    """Between devices: values that more than one device holds are read by one and sent to the others."""
    seconds: float
    """Reading, sending, writing if files are recut, and the restart."""


STAYING = Move(read_bytes=0, sent_bytes=0, seconds=0.0)
"""No move: training continues unchanged."""


def move_to(plan: Plan, profile: Profile, rates: MoveRates, *, recut: bool) -> Move:
    """Return the cost of loading a checkpoint under ``plan``.

    ``recut``: files are cut for one layout, so that they are read and written once more before they are loaded.
    """
    layout, cluster = plan.layout, plan.cluster
    width = layout.num_devices // layout.pipeline_size
    held = [{name: rank.terms.get(name, 0) for name in _STATE} for rank in plan.memory]
    everywhere = width * sum(sum(terms.values()) for terms in held)
    encoders = sum(phase.state_bytes for phase in plan.hetero.encoders) if plan.hetero is not None else 0
    replicas = layout.data_size * layout.context_size
    copies = replicas // layout.expert_size if _is_mostly_experts(plan) else replicas
    parameters = width * sum(terms["parameters"] for terms in held) // max(1, copies)
    optimizer = width * sum(terms["optimizer"] for terms in held)
    optimizer = optimizer if layout.distributed_optimizer else optimizer // max(1, replicas)
    once = parameters + optimizer + encoders
    sent = max(0, everywhere + encoders * layout.num_devices - once)
    reading_s = once / (rates.storage_bytes_per_s * cluster.num_nodes)
    tier = profile.device.inter if cluster.num_nodes > 1 else profile.device.intra
    sending_s = sent / layout.num_devices / tier.of("broadcast").bytes_per_s
    # A recut reads and writes every value on one node.
    recut_s = 2 * once / rates.storage_bytes_per_s if recut else 0.0
    return Move(read_bytes=once, sent_bytes=sent, seconds=reading_s + sending_s + recut_s + rates.restart_s)


def _is_mostly_experts(plan: Plan) -> bool:
    return plan.layout.expert_size > 1 and any(module.num_experts for module in plan.model.modules)
