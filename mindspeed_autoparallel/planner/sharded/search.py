"""Search of a sharded training: from a profile to a plan."""

from __future__ import annotations

import time

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.results import release
from mindspeed_autoparallel.planner.sharded.baselines import baselines_of
from mindspeed_autoparallel.planner.sharded.entries import Found, ShardedOptions
from mindspeed_autoparallel.planner.sharded.frontier import Frontier
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.planner.sharded.wrapping import MOST_PATTERNS, UnitSearch, rewrap
from mindspeed_autoparallel.profiles.sharded import ShardedProfile
from mindspeed_autoparallel.spec.cluster import Cluster
from mindspeed_autoparallel.spec.plan import ProfileRecord
from mindspeed_autoparallel.spec.sharded import ShardedDecisions, ShardingHost
from mindspeed_autoparallel.spec.sharded_plan import ShardedPlan, ShardedSearch
from mindspeed_autoparallel.units import US_PER_S, format_bytes

__all__ = ["ShardedOptions", "search_sharded"]

_SCOPE = (
    "fully_shard, Ulysses, ring, expert and micro-batch sizes that the profile has costs for; one reshard switch and "
    "one prefetch depth (0 to 2) for all groups, for Megatron-FSDP four unit sizes; the host's chunk sizes of the "
    "loss; {units}; a policy for every layer, chunked micro batches where the file has their plan and no unit in a "
    "chunked layer has hooks of its own. "
    "Not searched: other units of the longest stack of layers, switches that differ by group"
)
_UNITS_S = 10.0
"""Processor seconds for units other than the shipped ones when the search has used up its time."""


def search_sharded(
    profile: ShardedProfile,
    cluster: Cluster,
    host: ShardingHost,
    shipped: ShardedDecisions,
    options: ShardedOptions | None = None,
    source_files: tuple[str, ...] = (),
) -> ShardedPlan:
    """Return the plan with the fastest configuration that fits; its global batch size is that of ``shipped``.

    Raises ``InfeasiblePlan`` with the least peak found if nothing fits.
    """
    options = options or ShardedOptions()
    started = time.process_time()
    problem = Problem(profile, host, cluster.devices_per_node)
    search = Frontier(problem, cluster, shipped, options)
    search.offer_shipped()
    search.run()
    if search.best is None and host.offload_optimizer:
        search.run(offload_optimizer=True)
    if search.best is None:
        least = "" if search.least_peak is None else f": the least peak found is {format_bytes(search.least_peak)}"
        raise InfeasiblePlan(
            f"nothing fits in {format_bytes(search.limit)} on each of {cluster.num_devices} devices{least}. Use more "
            "devices, a smaller batch, or more memory."
        )
    if host.lists_units:
        rewrap(search)  # a faster best leaves less to polish
    bound, units = search.polish(), "the units of the shipped configuration"
    if host.lists_units:
        bound = min(bound, UnitSearch(search, _UNITS_S).run())
        units = f"units beside the longest stack of layers (at most {MOST_PATTERNS} patterns)"
    search.enlarge_chunks()
    return _plan(search, cluster, bound, time.process_time() - started, (_SCOPE.format(units=units), source_files))


def _plan(
    search: Frontier, cluster: Cluster, bound: int, seconds: float, told: tuple[str, tuple[str, ...]]
) -> ShardedPlan:
    best, profile, problem = search.best, search.problem.profile, search.problem
    assert best is not None
    gap = max(0.0, 1 - bound / round(best.outcome.step.total_us * 1000))
    rows = (row.values() for sizes, row in search.solved.items() if sizes != best.decisions.sizes)
    others = sorted((min(row, key=_step) for row in rows), key=_step)
    tokens = profile.tokens_per_sample * best.decisions.sizes.global_batch_size
    return ShardedPlan(
        model=profile.model,
        cluster=cluster,
        host=problem.host.name,
        decisions=best.decisions,
        step=best.outcome.step,
        memory=best.outcome.memory,
        tokens_per_s_per_device=tokens / best.outcome.step.total_us * US_PER_S / cluster.num_devices,
        baselines=baselines_of(problem, search.shipped, search.limit),
        alternatives=tuple(one.outcome for one in others[: search.options.top_k]),
        search=ShardedSearch(
            status="optimal" if gap <= 1e-4 else "feasible",
            lower_bound_us=min(bound / 1000, best.outcome.step.total_us),
            gap_fraction=gap,
            num_sizes=len(search.verdicts),
            num_solved=sum(one.outcome == "solved" for one in search.verdicts),
            seconds=seconds,
            verdicts=tuple(search.verdicts),
            scope=told[0],
        ),
        profile=_record(profile),
        tool_version=release(),
        source_files=told[1],
    )


def _step(found: Found) -> float:
    return found.outcome.step.total_us


def _record(profile: ShardedProfile) -> ProfileRecord:
    return ProfileRecord(
        sha256=profile.sha256(),
        source=profile.provenance.source,
        device=profile.provenance.device,
        created_utc=profile.provenance.created_utc,
        model_hash=profile.provenance.model_hash,
        notes=profile.notes,
    )
