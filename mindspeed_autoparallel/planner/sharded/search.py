"""Search of a sharded training: from a profile to a plan."""

from __future__ import annotations

import time
from dataclasses import replace

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.results import release
from mindspeed_autoparallel.planner.sharded.entries import Found, ShardedOptions
from mindspeed_autoparallel.planner.sharded.frontier import Frontier
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.prefixes import fewest_first
from mindspeed_autoparallel.planner.sharded.pricing import layer_policies, outcome_of, policies_by_pattern, priced
from mindspeed_autoparallel.planner.sharded.problem import Problem, Unmeasured
from mindspeed_autoparallel.planner.sharded.wrapping import MOST_PATTERNS, UnitSearch, rewrap
from mindspeed_autoparallel.profiles.sharded import ShardedProfile
from mindspeed_autoparallel.schedule.sharded import Replayed, replay
from mindspeed_autoparallel.spec.layout import Cluster
from mindspeed_autoparallel.spec.sharded import EACH, RECOMPUTE, ShardedDecisions, ShardingHost
from mindspeed_autoparallel.spec.sharded_plan import ShardedOutcome, ShardedPlan, ShardedSearch
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
    unpolished = search.best
    bound, units = search.polish(), "the units of the shipped configuration"
    if host.lists_units:
        if search.best is not unpolished:
            rewrap(search)
        bound = min(bound, UnitSearch(search, _UNITS_S).run())
        units = f"units outside the longest stack of layers (at most {MOST_PATTERNS} patterns)"
    search.enlarge_chunks()
    seconds = time.process_time() - started
    return _plan(search, cluster, bound, seconds, _SCOPE.format(units=units), source_files)


def _plan(
    search: Frontier, cluster: Cluster, bound: int, seconds: float, scope: str, source_files: tuple[str, ...]
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
            scope=scope,
        ),
        profile=profile.provenance.as_record(profile.sha256(), profile.notes),
        tool_version=release(),
        source_files=source_files,
    )


def _step(found: Found) -> float:
    return found.outcome.step.total_us


def baselines_of(problem: Problem, shipped: ShardedDecisions, limit_bytes: int) -> tuple[ShardedOutcome, ...]:
    """Return the baselines for which the profile has costs."""
    try:
        outcomes = [priced(problem, shipped, limit_bytes, "shipped")]
    except Unmeasured:
        return ()
    bare = replace(shipped, policies={})
    outcomes.append(priced(problem, bare, limit_bytes, "without recomputation"))
    if problem.host.layer_choice == EACH:
        outcomes.append(_greedy(problem, bare, limit_bytes))
    return tuple(outcomes)


def _greedy(problem: Problem, bare: ShardedDecisions, limit_bytes: int) -> ShardedOutcome:
    """Return the shipped sizes with the fewest layers recomputed that fit, counted from the last layer on."""
    lowering = Lowering(problem, bare)
    layers = [module.name for module in problem.profile.modules if module.is_layer and module.needs_backward]

    def run(policies: dict[str, str]) -> Replayed:
        return replay(lowering.training(policies))

    replayed, policies = run({}), dict[str, str]()
    if replayed.peak_bytes > limit_bytes and layers:
        found = fewest_first({RECOMPUTE: layers[::-1]}, run, limit_bytes, all_or_none=False)
        everything = dict.fromkeys(layers, RECOMPUTE)
        replayed, policies = found or (run(everything), everything)
    chosen = replace(bare, policies=policies_by_pattern(problem, policies))
    note = f"{len(layer_policies(problem, chosen))} layers recomputed, from the last one on"
    return outcome_of(lowering, chosen, replayed, limit_bytes, "greedy", note)
