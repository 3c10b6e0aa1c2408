"""The whole search: every layout is solved, discarded by a proved bound, or ruled out with a named reason.

Best-first by lower bound: cheap bound, then linear relaxation, then exact solve. When the best plan is no slower than
the smallest bound left, it is optimal under the cost model.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.assembly import assemble_plan
from mindspeed_autoparallel.planner.bounds import pipeline_bound_ns, relaxed_bound_ns, tail_bound_us
from mindspeed_autoparallel.planner.evaluate import NS_PER_US
from mindspeed_autoparallel.planner.inner import LayoutResult, limits_of, shortage_of, simple_splits, solve_layout
from mindspeed_autoparallel.planner.problem_building import build_problem
from mindspeed_autoparallel.planner.relaxations import relaxations_of
from mindspeed_autoparallel.planner.space import Candidate, SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan
from mindspeed_autoparallel.spec.plan import Relaxation, SearchRecord, Verdict
from mindspeed_autoparallel.units import format_bytes

NUM_SEEDS = 12
SHORT_SOLVE_S = 3.0
"""First go at a layout; most are proved in less. What is left open is taken up again once all have had a go."""
ROUNDING = 1e-6
"""A gap of no more than this is rounding to nanoseconds: the plan is called optimal."""
EXACT = 1e-9
"""Relative difference below which two step times are the same."""


@dataclass
class _State:
    """What the search knows so far."""

    solved: list[tuple[Candidate, LayoutResult]] = field(default_factory=list)
    seeds: list[tuple[Candidate, LayoutResult]] = field(default_factory=list)
    """Simple splits that fit: something to prune by before the first solve."""
    verdicts: list[Verdict] = field(default_factory=list)
    short: list[Candidate] = field(default_factory=list)
    """Layouts without a plan that fits."""
    open_bounds_us: dict[str, float] = field(default_factory=dict)
    """Bounds of layouts that were not settled, by label."""

    @property
    def best_us(self) -> float:
        return min((_step(result) for _, result in (*self.solved, *self.seeds)), default=float("inf"))


def search(
    profile: Profile, cluster: Cluster, global_batch_size: int, *, time_limit_s: float = 600.0, top_k: int = 3,
    seed: int = 0, num_workers: int = 1, progress: Callable[[str], None] | None = None,
    layouts: list[Layout] | None = None, options: SpaceOptions | None = None, with_relaxations: bool = True,
) -> Plan:  # fmt: skip
    """The fastest plan for the cluster, with its proof.

    ``layouts``: only these. Raises ``InfeasiblePlan`` (tightest stage, missing memory, smallest relaxation) or
    ``ConfigError``.
    """
    if global_batch_size < 1:
        raise ConfigError(f"the global batch size must be at least 1, got {global_batch_size}.")
    if not 0 < time_limit_s < float("inf"):
        raise ConfigError(f"the time limit must be above 0 s, got {time_limit_s:g}.")
    if top_k < 1 or num_workers < 1:
        raise ConfigError(f"top_k and num_workers must be at least 1, got {top_k} and {num_workers}.")
    if not 0 <= seed < 2**31:
        raise ConfigError(f"the seed must be 0 to {2**31 - 1}, got {seed}.")
    started = time.monotonic()
    say = progress or (lambda text: None)
    candidates, verdicts = enumerate_layouts(profile, cluster, global_batch_size, options or SpaceOptions(), layouts)
    if not candidates:
        raise _nothing_to_search(verdicts, global_batch_size)
    say(f"{len(candidates)} layouts to search, {len(verdicts)} ruled out")
    state = _State(verdicts=verdicts)
    deadline = started + time_limit_s
    _run(profile, cluster, global_batch_size, candidates, state, deadline, top_k, seed, say)
    _adopt_faster_seed(state)
    state.solved.sort(key=lambda item: (_step(item[1]), item[0].layout.label()))
    if not state.solved:
        raise _infeasible(profile, cluster, global_batch_size, state)
    best, result = state.solved[0]
    step_us = _step(result)
    bound_us = min([step_us, *state.open_bounds_us.values(), *(found.lower_bound_us for _, found in state.solved)])
    gap = max(0.0, 1 - bound_us / step_us) if step_us else 0.0
    relaxations: tuple[Relaxation, ...] = ()
    if with_relaxations and time.monotonic() < deadline:
        relaxations = relaxations_of(
            profile, cluster, global_batch_size, best, step_us, time_limit_s=min(10.0, deadline - time.monotonic()),
            seed=seed,
        )  # fmt: skip
    record = SearchRecord(
        status="optimal" if gap <= ROUNDING else "feasible", lower_bound_us=bound_us, gap_fraction=gap,
        num_configurations=len(candidates) + len(verdicts_before(state.verdicts)), num_solved=len(state.solved),
        seconds=time.monotonic() - started, verdicts=tuple(state.verdicts), relaxations=relaxations,
    )  # fmt: skip
    say(f"best: {best.layout.label()}, {step_us / 1000:.2f} ms, gap {gap:.3%}, {record.seconds:.1f} s")
    plan = assemble_plan(profile, cluster, global_batch_size, best, result, state.solved[1 : 1 + top_k], record)
    return replace(plan, search=replace(plan.search, seconds=time.monotonic() - started))


def verdicts_before(verdicts: list[Verdict]) -> list[Verdict]:
    """Those that never became candidates."""
    return [verdict for verdict in verdicts if verdict.outcome in ("illegal", "unmeasured")]


def _step(result: LayoutResult) -> float:
    assert result.evaluation is not None
    return result.evaluation.step.total_us


def _run(
    profile: Profile, cluster: Cluster, global_batch_size: int, candidates: list[Candidate], state: _State,
    deadline: float, top_k: int, seed: int, say: Callable[[str], None],
) -> None:  # fmt: skip
    """Work the queue: (bound, order, refined, candidate), smallest bound first."""
    queue: list[tuple[float, int, bool, Candidate]] = []
    for order, candidate in enumerate(candidates):
        bound = pipeline_bound_ns(profile, candidate) / NS_PER_US + tail_bound_us(profile, cluster, candidate)
        queue.append((bound, order, False, candidate))
    heapq.heapify(queue)
    for bound, _, _, candidate in heapq.nsmallest(NUM_SEEDS, queue):
        for simple in simple_splits(profile, cluster, candidate, global_batch_size):
            if simple.evaluation.fits and simple.evaluation.step.total_us < state.best_us:
                found = LayoutResult(
                    lower_bound_us=bound, placement=simple.placement, evaluation=simple.evaluation, timed_out=True
                )
                state.seeds.append((candidate, found))
    extra = top_k
    again: list[tuple[float, Candidate]] = []
    while queue:
        bound, order, refined, candidate = heapq.heappop(queue)
        layout = candidate.layout
        left = deadline - time.monotonic()
        if bound >= state.best_us * (1 - EXACT):
            # The rest can only become alternatives: a few, by count and not by time, so that a rerun finds the same.
            if len(state.solved) > top_k or extra <= 0 or left <= 0:
                state.verdicts.append(_bounded(layout, bound, state.best_us))
                continue
            if refined:
                extra -= 1
        elif left <= 0:
            state.open_bounds_us[layout.label()] = bound
            state.verdicts.append(Verdict(
                layout=layout, outcome="unsolved", reason="the time limit came first.", lower_bound_us=bound,
            ))  # fmt: skip
            continue
        if not refined:
            better = _refined(profile, cluster, candidate, bound, deadline, state.best_us)
            if better is None:
                _no_fit(state, candidate)
            else:
                heapq.heappush(queue, (better, order, True, candidate))
            continue
        losing = bound >= state.best_us * (1 - EXACT)
        unsettled = _solve_one(
            profile, cluster, global_batch_size, candidate, bound, state, min(left, SHORT_SOLVE_S), seed, say
        )
        if unsettled and not losing:
            again.append((bound, candidate))
    # What a short solve left open, and what may still be faster than the best: with the time that is left.
    for index, (bound, candidate) in enumerate(again):
        left = deadline - time.monotonic()
        known = [result.lower_bound_us for other, result in state.solved if other is candidate]
        if left > 0 and max([bound, *known]) < state.best_us * (1 - EXACT):
            _forget(state, candidate)
            seconds = left / (len(again) - index)
            _solve_one(profile, cluster, global_batch_size, candidate, max([bound, *known]), state, seconds, seed, say)


def _adopt_faster_seed(state: _State) -> None:
    """Where time ended before a seed's layout was solved, or solved again, the seed is the plan."""
    if not state.seeds:
        return
    candidate, seed = min(state.seeds, key=lambda item: _step(item[1]))
    if any(_step(result) <= _step(seed) for _, result in state.solved):
        return
    known = [result.lower_bound_us for other, result in state.solved if other is candidate]
    bound = min(_step(seed), max([seed.lower_bound_us, *known]))
    state.solved = [item for item in state.solved if item[0] is not candidate]
    state.solved.append((candidate, replace(seed, lower_bound_us=bound)))


def _forget(state: _State, candidate: Candidate) -> None:
    """Take back what a short solve said; its plan stays as a seed."""
    state.seeds += [item for item in state.solved if item[0] is candidate]
    state.seeds.sort(key=lambda item: -_step(item[1]))
    state.solved = [item for item in state.solved if item[0] is not candidate]
    state.verdicts = [verdict for verdict in state.verdicts if verdict.layout != candidate.layout]


def _solve_one(
    profile: Profile, cluster: Cluster, global_batch_size: int, candidate: Candidate, bound: float, state: _State,
    seconds: float, seed: int, say: Callable[[str], None],
) -> bool:  # fmt: skip
    """Solve a layout and record its verdict; true when time ended before its proof."""
    layout, before = candidate.layout, state.best_us
    result = solve_layout(
        profile, cluster, candidate, global_batch_size, time_limit_s=max(0.1, seconds), seed=seed, cutoff_us=before
    )
    if result.evaluation is None:
        if result.proved_infeasible:
            _no_fit(state, candidate)
            return False
        open_bound = max(bound, result.lower_bound_us)
        state.open_bounds_us[layout.label()] = open_bound
        reason = "the time limit came first." if result.timed_out else "no split that fits exactly was found."
        state.verdicts.append(Verdict(
            layout=layout, outcome="unsolved" if result.timed_out else "memory", reason=reason,
            lower_bound_us=open_bound,
        ))  # fmt: skip
        state.short.append(candidate)
        return result.timed_out
    state.open_bounds_us.pop(layout.label(), None)
    step = _step(result)
    result = replace(result, lower_bound_us=min(step, max(bound, result.lower_bound_us)))
    if step < before:
        say(f"{layout.label()}: {step / 1000:.2f} ms, bound {result.lower_bound_us / 1000:.2f} ms")
    state.solved.append((candidate, result))
    state.verdicts.append(Verdict(
        layout=layout, outcome="solved", reason=f"solved; bound {result.lower_bound_us / 1000:.3f} ms.",
        lower_bound_us=result.lower_bound_us, step_us=step,
    ))  # fmt: skip
    return result.timed_out and result.lower_bound_us < min(step, before)


def _refined(
    profile: Profile, cluster: Cluster, candidate: Candidate, bound: float, deadline: float, cutoff_us: float
) -> float | None:
    limits = limits_of(profile, cluster, candidate.layout.pipeline_size)
    tail_us = tail_bound_us(profile, cluster, candidate)
    problem = build_problem(
        profile, candidate.measurement, cluster, candidate.layout, candidate.num_microbatches, limits, safe=False,
        pipeline_cutoff_us=cutoff_us - tail_us,
    )  # fmt: skip
    relaxed = relaxed_bound_ns(problem, deadline)
    if relaxed is None:
        return None
    return max(bound, min(cutoff_us, relaxed / NS_PER_US + tail_us))


def _no_fit(state: _State, candidate: Candidate) -> None:
    state.short.append(candidate)
    state.verdicts.append(Verdict(
        layout=candidate.layout, outcome="memory", reason="no split fits the memory, with any recomputation.",
    ))  # fmt: skip


def _bounded(layout: Layout, bound: float, best_us: float) -> Verdict:
    return Verdict(
        layout=layout, outcome="bounded", lower_bound_us=bound,
        reason=f"at least {bound / 1000:.2f} ms; the best plan takes {best_us / 1000:.2f} ms.",
    )  # fmt: skip


def _nothing_to_search(verdicts: list[Verdict], global_batch_size: int) -> ConfigError:
    reasons: dict[str, int] = {}
    for verdict in verdicts:
        reasons[verdict.reason] = reasons.get(verdict.reason, 0) + 1
    common = sorted(reasons, key=lambda reason: (-reasons[reason], reason))[:3]
    listed = " ".join(f"({reasons[reason]}x) {reason}" for reason in common) or "the profile's sizes do not divide it."
    return ConfigError(
        f"no layout is possible for this cluster and a global batch of {global_batch_size}: {listed} "
        "Change the number of devices, the batch, or measure more sizes."
    )


def _infeasible(profile: Profile, cluster: Cluster, global_batch_size: int, state: _State) -> InfeasiblePlan:
    limit = cluster.memory_limit_bytes or profile.device.memory_capacity_bytes
    if not state.short:
        return InfeasiblePlan("no plan was found in time, and none was proved impossible. Raise the time limit.")
    # Most stages and most sharding come nearest: look at a few of each.
    tried = sorted(
        state.short, key=lambda item: (-item.layout.pipeline_size * item.layout.tensor_size, item.layout.label())
    )
    found = [
        (shortage, candidate)
        for candidate in tried[:24]
        if (shortage := shortage_of(profile, cluster, candidate, global_batch_size)) is not None
    ]
    if not found:
        return InfeasiblePlan(f"no plan fits in {format_bytes(limit)} per device.")
    shortage, candidate = min(found, key=lambda item: (item[0].missing_bytes, item[1].layout.label()))
    missing = max(0, shortage.missing_bytes)
    unsure = [verdict for verdict in state.verdicts if verdict.outcome == "unsolved"]
    maybe = f" {len(unsure)} layouts were not settled in time." if unsure else ""
    return InfeasiblePlan(
        f"no plan {'was found in time that ' if unsure else ''}fits in {format_bytes(limit)} per device. "
        f"Nearest is {candidate.layout.label()}: pipeline rank "
        f"{shortage.rank} ({shortage.held}) is tightest: {format_bytes(shortage.peak_bytes)}, "
        f"{format_bytes(missing)} too much, with as much recomputation as helps. A memory limit of "
        f"{-(-(limit + missing) // 2**20)} MiB per device is enough; or use more devices or a "
        f"smaller micro batch.{maybe}"
    )
