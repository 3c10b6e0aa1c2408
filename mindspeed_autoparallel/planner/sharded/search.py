"""Best-first over sizes and switches; the policies of every layer are solved inside."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.results import release
from mindspeed_autoparallel.planner.sharded.baselines import baselines_of
from mindspeed_autoparallel.planner.sharded.bounds import step_bound_ns
from mindspeed_autoparallel.planner.sharded.layers import LayerSearch, Solved
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.pricing import layer_policies, outcome_of, policies_by_pattern, priced
from mindspeed_autoparallel.planner.sharded.problem import Problem, Unmeasured
from mindspeed_autoparallel.planner.sharded.program import QUICK, THOROUGH
from mindspeed_autoparallel.planner.sharded.space import Switches, decided, sizes_of, switches_of
from mindspeed_autoparallel.profiles.sharded import ShardedProfile
from mindspeed_autoparallel.spec.cluster import Cluster
from mindspeed_autoparallel.spec.plan import ProfileRecord
from mindspeed_autoparallel.spec.sharded import ShardedDecisions, ShardingHost, ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedOutcome, ShardedPlan, ShardedSearch, ShardedVerdict
from mindspeed_autoparallel.units import US_PER_S, format_bytes

_SCOPE = (
    "fully_shard, Ulysses, ring, expert and micro-batch sizes that the profile has costs for; one reshard switch and "
    "one prefetch depth (0 to 2) for all groups; the host's chunk sizes of the loss; modules wrapped as shipped; a "
    "policy for every layer, chunked micro batches where the file has their plan and no unit lies in a chunked layer. "
    "Not searched: other wrapping, switches that differ by group"
)


@dataclass(frozen=True, kw_only=True)
class ShardedOptions:
    """How far a search goes."""

    time_limit_s: float = 10.0
    """Of processor time; a first plan is found whatever it takes."""
    gap: float = 0.002
    """Sizes whose bound is this close to the best are not tried."""
    top_k: int = 3


@dataclass(frozen=True)
class _Found:
    decisions: ShardedDecisions
    outcome: ShardedOutcome
    bound_ns: int


class _Search:
    def __init__(self, problem: Problem, cluster: Cluster, shipped: ShardedDecisions, options: ShardedOptions) -> None:
        self.problem, self.shipped, self.options = problem, shipped, options
        self.num_devices = cluster.num_devices
        self.limit = cluster.memory_limit_bytes or problem.profile.device.memory_capacity_bytes
        self.best: _Found | None = None
        self.by_sizes: dict[str, _Found] = {}
        self.verdicts: list[ShardedVerdict] = []
        self.least_peak: int | None = None
        self.end = time.process_time() + options.time_limit_s

    @property
    def best_ns(self) -> int | None:
        return None if self.best is None else round(self.best.outcome.step.total_us * 1000)

    def run(self, *, offload_optimizer: bool = False) -> int:
        """Search all sizes; return what nothing searched can be faster than, in nanoseconds.

        Sizes whose bound is within a percent of the best wait for the second pass.
        """
        waiting = self._queue(offload_optimizer=offload_optimizer)
        bounds: list[int] = []
        for gap in dict.fromkeys((max(0.01, self.options.gap), self.options.gap)):
            skipped = []
            for bound, sizes in waiting:
                if self.best_ns is not None and bound >= self.best_ns * (1 - gap):
                    skipped.append((bound, sizes))
                elif self.best_ns is not None and time.process_time() > self.end:
                    bounds.append(bound)
                    self._verdict(sizes, "unsolved", "the time limit came first", bound)
                else:
                    bounds.append(self._sizes(sizes, bound, offload_optimizer=offload_optimizer))
            waiting = skipped
        for bound, sizes in waiting:
            self._verdict(sizes, "bounded", "no faster than the best, or by less than the requested gap", bound)
        return min([*bounds, *(bound for bound, _ in waiting)], default=0)

    def _queue(self, *, offload_optimizer: bool) -> list[tuple[int, ShardSizes]]:
        """Return all sizes whose states fit, with their bounds, the lowest first."""
        queue = []
        for sizes in sizes_of(self.problem, self.num_devices, self.shipped.sizes.global_batch_size):
            bounds = []
            try:
                # The bound falls with the prefetch depth.
                for switches in switches_of(self.problem, sizes, offload_optimizer=offload_optimizer):
                    if switches.prefetch < max(self.problem.host.prefetch_depths):
                        continue
                    lowering = Lowering(self.problem, decided(self.shipped, self.problem, sizes, switches))
                    bounds.append(step_bound_ns(lowering, self.limit))
            except Unmeasured as reason:
                self.verdicts.append(ShardedVerdict(sizes=sizes, outcome="unmeasured", reason=str(reason)))
                continue
            possible = [bound for bound in bounds if bound is not None]
            if possible:
                queue.append((min(possible), sizes))
            else:
                self._note_peak(lowering.static_bytes)
                self._verdict(sizes, "memory", "states and the least activations exceed the memory", 0)
        queue.sort(key=lambda item: (item[0], item[1].accumulation, -item[1].fully_shard_size))
        return queue

    def _verdict(self, sizes: ShardSizes, outcome: str, reason: str, bound: int, step_us: float | None = None) -> None:
        self.verdicts.append(
            ShardedVerdict(sizes=sizes, outcome=outcome, reason=reason, lower_bound_us=bound / 1000, step_us=step_us)
        )

    def _sizes(self, sizes: ShardSizes, bound: int, *, offload_optimizer: bool) -> int:
        """Search the switches of ``sizes``; return its bound."""
        found: list[int] = []
        mine: _Found | None = None
        too_large: set[tuple[int, int]] = set()
        for switches in switches_of(self.problem, sizes, offload_optimizer=offload_optimizer):
            chunks = (switches.loss_chunk, switches.micro_batch_chunk)
            if chunks in too_large:
                continue
            if self.best_ns is not None and time.process_time() > self.end:
                found.append(bound)
                break
            lower, candidate = self._switches(sizes, switches)
            if lower is not None:
                found.append(max(bound, lower))
            elif self._holds_least(switches):  # all others hold at least as much
                too_large.add(chunks)
            if candidate is not None and (mine is None or candidate.outcome.step.total_us < mine.outcome.step.total_us):
                mine = candidate
        if not found:
            self._verdict(sizes, "memory", "nothing fits the memory", bound)
            return 2**62
        if mine is None:
            self._verdict(sizes, "bounded", "no faster than the best", min(found))
            return min(found)
        self._verdict(sizes, "solved", "", min(found), mine.outcome.step.total_us)
        self.by_sizes[sizes.label()] = mine
        return min(found)

    def _holds_least(self, switches: Switches) -> bool:
        """Return whether all other switches with these chunks hold at least as much."""
        host = self.problem.host
        return switches.reshard == max(host.reshard_choices) and switches.prefetch == min(host.prefetch_depths)

    def _switches(self, sizes: ShardSizes, switches: Switches) -> tuple[int | None, _Found | None]:
        """Return a bound, ``None`` where nothing fits, and the best policies where they may beat the best so far."""
        decisions = decided(self.shipped, self.problem, sizes, switches)
        lowering = Lowering(self.problem, decisions)
        if switches.micro_batch_chunk and lowering.parts == 1:
            return self.best_ns, None
        least = step_bound_ns(lowering, self.limit)
        if least is None:
            self._note_peak(lowering.static_bytes)
            return None, None
        target = None if self.best_ns is None else round(self.best_ns * (1 - self.options.gap))
        if target is not None and least >= target:
            return least, None
        search = LayerSearch(lowering, self.limit, QUICK)
        kept = search.run({})
        lower = search.path_bound_ns(kept)
        if lower is not None and target is not None and lower >= target:
            return lower, None
        if lower is None or not search.may_fit():
            self._note_peak(search.least_peak or kept.peak_bytes)
            return None, None
        solved = search.solve(target, kept)
        if solved is None:
            self._note_peak(search.least_peak)
            return None, None
        return solved.bound_ns, self._offer(lowering, decisions, solved)

    def _note_peak(self, peak: int) -> None:
        self.least_peak = peak if self.least_peak is None else min(self.least_peak, peak)

    def _offer(self, lowering: Lowering, decisions: ShardedDecisions, solved: Solved) -> _Found:
        chosen = replace(decisions, policies=policies_by_pattern(self.problem, solved.policies | lowering.forced))
        outcome = outcome_of(lowering, chosen, solved.replayed, self.limit, chosen.sizes.label())
        found = _Found(chosen, outcome, solved.bound_ns)
        if self.best is None or outcome.step.total_us < self.best.outcome.step.total_us:
            self.best = found
        return found

    def offer_shipped(self) -> None:
        """Take the shipped configuration as the best so far, where it fits."""
        try:
            outcome = priced(self.problem, self.shipped, self.limit, "shipped")
        except Unmeasured:
            return
        if outcome.feasible and self.shipped.sizes.num_devices == self.num_devices:
            self.best = _Found(self.shipped, outcome, 0)

    def polish(self, bound: int) -> int:
        """Solve the best sizes and switches thoroughly; return the bound, which may have risen."""
        assert self.best is not None
        decisions = replace(self.best.decisions, policies={})
        lowering = Lowering(self.problem, decisions)
        if layer_policies(self.problem, self.best.decisions):
            solved = LayerSearch(lowering, self.limit, replace(THOROUGH, total_s=3.0)).solve()
            if solved is not None:
                self._offer(lowering, decisions, solved)
        return min(bound, self.best_ns or bound)


def search_sharded(
    profile: ShardedProfile,
    cluster: Cluster,
    host: ShardingHost,
    shipped: ShardedDecisions,
    options: ShardedOptions | None = None,
    source_files: tuple[str, ...] = (),
) -> ShardedPlan:
    """Return the fastest configuration that fits; its global batch is that of ``shipped``.

    Raises ``InfeasiblePlan`` with the least peak found where nothing fits.
    """
    options = options or ShardedOptions()
    started = time.process_time()
    problem = Problem(profile, host, cluster.devices_per_node)
    search = _Search(problem, cluster, shipped, options)
    search.offer_shipped()
    bound = search.run()
    if search.best is None and host.offload_optimizer:
        bound = search.run(offload_optimizer=True)
    if search.best is None:
        least = "" if search.least_peak is None else f": the least peak found is {format_bytes(search.least_peak)}"
        raise InfeasiblePlan(
            f"nothing fits {format_bytes(search.limit)} on each of {cluster.num_devices} devices{least}. Use more "
            "devices, a smaller batch, or more memory."
        )
    bound = search.polish(bound)
    return _plan(search, cluster, bound, time.process_time() - started, source_files)


def _plan(search: _Search, cluster: Cluster, bound: int, seconds: float, source_files: tuple[str, ...]) -> ShardedPlan:
    best, profile, problem = search.best, search.problem.profile, search.problem
    assert best is not None
    gap = max(0.0, 1 - bound / round(best.outcome.step.total_us * 1000))
    others = sorted(search.by_sizes.values(), key=lambda one: one.outcome.step.total_us)
    others = [one for one in others if one.decisions.sizes != best.decisions.sizes]
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
            lower_bound_us=bound / 1000,
            gap_fraction=gap,
            num_sizes=len(search.verdicts),
            num_solved=sum(one.outcome == "solved" for one in search.verdicts),
            seconds=seconds,
            verdicts=tuple(search.verdicts),
            scope=_SCOPE,
        ),
        profile=_record(profile),
        tool_version=release(),
        source_files=source_files,
    )


def _record(profile: ShardedProfile) -> ProfileRecord:
    return ProfileRecord(
        sha256=profile.sha256(),
        source=profile.provenance.source,
        device=profile.provenance.device,
        created_utc=profile.provenance.created_utc,
        model_hash=profile.provenance.model_hash,
        notes=profile.notes,
    )
